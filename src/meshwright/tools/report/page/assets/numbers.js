// Numbers: unpacking, ticks, formatting and smoothing. Independent of the page.

function unpack(text) {
  const binary = atob(text.slice(1));
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return text[0] === "d" ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
}

function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-4) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e").replace("-", "−");
  if (Number.isInteger(value)) return value.toLocaleString("en-US").replace("-", "−");
  const digits = size >= 1000 ? 1 : size >= 100 ? 2 : size >= 1 ? 4 : 4 - Math.floor(Math.log10(size)) - 1;
  return value.toFixed(digits).replace("-", "−");
}

// Three digits, where several runs share a line.
function brief(value) {
  if (value === null || value === undefined || !Number.isFinite(value) || (Number.isInteger(value) && Math.abs(value) < 1e5)) return formatNumber(value);
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e").replace("-", "−");
  return (size >= 1000 ? Math.round(value).toLocaleString("en-US") : value.toPrecision(size >= 1 ? 4 : 3)).replace("-", "−");
}

// A value in the unit of its metric: a number, a time in seconds, or a moment.
function inUnit(unit, plain = formatNumber) {
  if (unit === "duration") return (value) => (Number.isFinite(value) && value !== null ? formatDuration(value) : formatNumber(value));
  if (unit === "clock") return (value) => (Number.isFinite(value) && value !== null ? formatClock(value) : formatNumber(value));
  return plain;
}

function formatDuration(seconds) {
  const s = Math.max(0, seconds);
  if (s > 0 && s < 1) return `${formatNumber(s < 0.001 ? s * 1e6 : s * 1e3).replace(/(\.\d)\d*$/, "$1")} ${s < 0.001 ? "µs" : "ms"}`;
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(Math.floor(s % 60)).padStart(2, "0")} s`;
  const hours = Math.floor(s / 3600);
  const minutes = String(Math.floor((s % 3600) / 60)).padStart(2, "0");
  return hours < 48 ? `${hours} h ${minutes} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const two = (n) => String(n).padStart(2, "0");

function formatClock(seconds, withDay = true) {
  const d = new Date(seconds * 1000);
  const time = `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
  return withDay ? `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${time}` : time;
}

// The values between which a curve is drawn. Beyond are outliers: at most 2 % at each end, and further from the next value
// than twice what the others span. The values of a curve that begins high and falls are near each other.
function outlierFence(values, log) {
  if (values.length < 50) return [-Infinity, Infinity];
  const sorted = Float64Array.from(values, log ? Math.log10 : undefined).sort();
  const last = sorted.length - 1, few = Math.max(1, Math.floor(0.02 * last));
  const spread = 2 * (sorted[last - few] - sorted[few]);
  if (!(spread > 0)) return [-Infinity, Infinity];  // a constant: nothing says what is far
  let low = few, high = last - few;
  while (low > 0 && sorted[low] - sorted[low - 1] <= spread) low--;
  while (high < last && sorted[high + 1] - sorted[high] <= spread) high++;
  return [sorted[low], sorted[high]].map((v) => (log ? 10 ** v : v));
}

// Round steps between ticks: 1, 2 or 5 times a power of ten, or for times what clocks have.
function niceStep(span, count) {
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 5, 10].find((f) => f * power >= rough * 0.999);
  return factor * power;
}

const CLOCK_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

function linearTicks(low, high, count) {
  const step = niceStep(high - low, count);
  const decimals = Math.min(20, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && ticks.length < 50; i++) {
    ticks.push({ at: i * step, text: tickText(i * step, step, decimals, Math.max(Math.abs(low), Math.abs(high))) });
  }
  return ticks;
}

function tickText(value, step, decimals, largest) {
  if (value === 0) return "0";
  if (largest >= 1e9 || largest < 1e-3) return value.toExponential(Math.max(0, Math.min(4, Math.round(Math.log10(Math.abs(value) / step))))).replace("e+", "e").replace("-", "−");
  if (step >= 1e6) return `${+(value / 1e6).toFixed(1)}M`;
  if (step >= 1e3) return `${+(value / 1e3).toFixed(1)}k`;
  return value.toFixed(decimals).replace("-", "−");
}

function logTicks(low, high) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  if (high / low < 8) return linearTicks(low, high, 4).filter((tick) => tick.at > 0);
  if (last - first < 3) return [1, 2, 5].flatMap((m) => [first - 1, first, first + 1, first + 2].map((p) => +(m * 10 ** p).toPrecision(1))).filter((at) => at >= low && at <= high).map((at) => ({ at, text: at >= 1e-4 && at < 1e6 ? String(at) : at.toExponential(0).replace("e+", "e").replace("-", "−") }));
  const every = Math.ceil((last - first + 1) / 6);
  const ticks = [];
  for (let power = first; power <= last; power += every) {
    ticks.push({ at: 10 ** power, text: Math.abs(power) < 4 ? String(+(10 ** power).toPrecision(1)) : `1e${power}`.replace("-", "−") });
  }
  return ticks;
}

function timeTicks(low, high, count, wall) {
  const span = high - low;
  if (span < count) return linearTicks(wall ? 0 : low, wall ? span : high, count).map((tick) => ({ at: tick.at + (wall ? low : 0), text: wall ? `+${tick.text}s` : `${tick.text}s` }));
  const step = CLOCK_STEPS.find((s) => s >= span / count) ?? niceStep(span / 86400, count) * 86400;
  const shift = wall ? new Date(low * 1000).getTimezoneOffset() * 60 : 0;
  const ticks = [];
  for (let at = Math.ceil((low - shift) / step) * step + shift; at <= high && ticks.length < 50; at += step) {
    ticks.push({ at, text: wall ? wallText(at, step) : relativeText(at, step) });
  }
  return ticks;
}

function wallText(at, step) {
  const d = new Date(at * 1000);
  if (step >= 43200) return `${two(d.getMonth() + 1)}-${two(d.getDate())}`;
  return step < 60 ? formatClock(at, false) : `${two(d.getHours())}:${two(d.getMinutes())}`;
}

function relativeText(at, step) {
  if (step >= 86400) return `${Math.round(at / 86400)}d`;
  if (step >= 3600) return `${Math.round(at / 3600)}h`;
  const h = Math.floor(at / 3600), m = Math.floor((at % 3600) / 60), s = Math.round(at % 60);
  if (step >= 60) return h || at === 0 ? (h ? `${h}:${two(m)}h` : "0") : `${m}m`;
  return at < 60 ? `${s}s` : h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

// An exponential mean whose memory is a length on the axis, so that curves logged more often are not smoothed less.
// Weights that sum to one from the first point on: nothing pulls its beginning towards zero.
// Values beyond the fence are outliers, which do not move it.
function smoothed(x, y, memory, fence) {
  const out = new Float64Array(y.length);
  let sum = 0, weight = 0, before = x[0];
  for (let i = 0; i < y.length; i++) {
    const v = y[i];
    if (!Number.isFinite(v)) { out[i] = NaN; continue; }
    if (v < fence[0] || v > fence[1]) { out[i] = sum / weight; continue; }
    const keep = Math.exp(-Math.max(0, x[i] - before) / memory);
    sum = sum * keep + v;
    weight = weight * keep + 1;
    before = x[i];
    out[i] = sum / weight;
  }
  return out;
}

// The index of the first x that is not below a limit.
function firstFrom(x, limit) {
  let low = 0, high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < limit) low = middle + 1; else high = middle;
  }
  return low;
}

function nearest(x, wanted) {
  const i = firstFrom(x, wanted);
  if (i === 0) return 0;
  return i < x.length && x[i] - wanted < wanted - x[i - 1] ? i : i - 1;
}
