"""Devices that a script names and this machine does not have."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.tools.plan.tracing.host.devices import AbsentDevices, present
from tests.tools.plan.tracing.traced import trace_of


def test_names_of_accelerators_stand_for_the_device_of_this_process() -> None:
    assert present("cuda:3") == "cpu"
    assert present(torch.device("xpu", 1)) == torch.device("cpu")
    assert present("meta") == "meta"
    assert present(torch.bfloat16) is torch.bfloat16
    assert present(3) == 3
    assert present(3, is_device=True) == "cpu"


def test_tensors_and_models_move_to_an_absent_device() -> None:
    with AbsentDevices():
        assert torch.ones(2, device="cuda").cuda().to("cuda:1", torch.float16).dtype is torch.float16
        assert torch.nn.Linear(2, 2).to("cuda").weight.device.type == "cpu"


def test_a_script_that_writes_cuda_everywhere_is_planned(tmp_path: Path) -> None:
    source = """
torch.cuda.set_device(0)
device = torch.device("cuda", torch.cuda.current_device())
model = nn.Linear(4, 4).cuda()
teacher = nn.Linear(4, 4).to(device)
scaler = torch.amp.GradScaler("cuda")
generator = torch.Generator(device="cuda").manual_seed(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(8, 4), batch_size=2))
for batch in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = model(batch.to("cuda", non_blocking=True)) - teacher(batch.cuda())
    assert output.dtype is torch.bfloat16
    scaler.scale(output.float().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == 0
"""
    assert len(trace_of(source, tmp_path).steps) == 2
