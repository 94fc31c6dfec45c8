"""Files that a planned script does not write."""

from __future__ import annotations

from pathlib import Path

from tests.tools.plan.tracing.traced import LOOP, trace_of


def test_nothing_is_saved_or_logged(tmp_path: Path) -> None:
    folder = tmp_path / "written"
    source = f"""
folder = {str(folder)!r}
accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
accelerator.init_trackers("run", config={{"lr": 0.1}})
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(8, 4), batch_size=2))
assert accelerator.resume() is None
accelerator.get_tracker("jsonl").store_init_configuration({{}})
{LOOP}
    accelerator.log({{"loss": loss}}, step=1)
    accelerator.save_state(folder + "/state")
    accelerator.save_model(model, folder)
    accelerator.save(model.state_dict(), folder + "/weights")
    torch.save(model.state_dict(), folder + "/weights.pt")
    accelerator.save_if_preempted()
"""
    assert len(trace_of(source, tmp_path).steps) == 2
    assert not folder.exists() or not list(folder.iterdir())
