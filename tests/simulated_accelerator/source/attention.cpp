// Which attention torch chooses: the CPU's flash attention, where the CPU would take it.

#include <ATen/Context.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

namespace at::native {

int64_t choose_attention(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& mask,
    double dropout,
    bool is_causal,
    std::optional<double>,
    bool) {
  const bool is_simple = query.dim() == 4 && key.dim() == 4 && !mask.has_value() && dropout == 0.0 &&
      query.size(1) == key.size(1) && query.size(3) == value.size(3) && (!is_causal || query.size(2) == key.size(2));
  const bool is_flash = is_simple && at::globalContext().userEnabledFlashSDP();
  return static_cast<int64_t>(is_flash ? sdp::SDPBackend::flash_attention : sdp::SDPBackend::math);
}

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)

} // namespace at::native
