"""Numbers of tensors that have no data."""

from __future__ import annotations

from pathlib import Path

from tests.tools.plan.tracing.traced import LOOP, printed_by, trace_of

_TOKENS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 4)
        self.head = nn.Linear(4, 16)
    def forward(self, batch):
        hidden = self.table(batch.clamp(min=0))
        return self.head(hidden[batch >= 0]).logsumexp(-1)
model = Model()
data = [torch.tensor([i % 16] * 3 + [-1] * 5) for i in range(16)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
"""


def test_a_mask_of_tokens_chooses_as_many_elements_as_with_data(tmp_path: Path) -> None:
    trace = trace_of(_TOKENS + LOOP, tmp_path)
    assert trace.guesses == []
    products = {operation.shape for operation in trace.operations if operation.name == "aten.addmm"}
    assert products == {(6, 4, 16)}, "three of eight tokens of both samples"


def test_shuffled_data_is_no_question_of_the_script(tmp_path: Path) -> None:
    assert trace_of(_TOKENS.replace("batch_size=2", "batch_size=2, shuffle=True") + LOOP, tmp_path).guesses == []


def test_numbers_that_depend_on_parameters_are_guessed_and_their_lines_named(tmp_path: Path) -> None:
    questions = """
    total = 0.0
    if loss > 3:
        total += loss.item()
    print(f"{loss:.3f}", loss.tolist(), model(batch).detach().numpy().shape)
    chosen = model(batch)[model(batch) > 0]
"""
    trace = trace_of(_TOKENS + LOOP.replace("    optimizer.step()", questions + "    optimizer.step()"), tmp_path)
    lines = (tmp_path / "train.py").read_text().splitlines()
    asked = [lines[int(guess.split(":")[1].split()[0]) - 1].strip() for guess in trace.guesses]
    assert asked[:2] == ["if loss > 3:", "total += loss.item()"]
    assert all(guess.startswith(str(tmp_path / "train.py")) for guess in trace.guesses)
    assert {guess.split(" ", 1)[1] for guess in trace.guesses} == {
        "read a number of a tensor",
        "printed a tensor",
        "read the numbers of a tensor",
        "chose elements by a mask",
    }


def test_a_known_tensor_is_changed_in_place_and_forgotten_where_the_change_is_unknown(tmp_path: Path) -> None:
    questions = """
counts = torch.zeros(2, dtype=torch.int64)
view = counts[1:]
counts += 3
print("known", view.item())
counts += model(torch.zeros(1, 8, dtype=torch.int64)).argmax()
print("unknown", view.item())
"""
    assert printed_by(_TOKENS + questions, tmp_path) == ["known 3", "unknown 1"]


def test_no_gradient_is_infinite(tmp_path: Path) -> None:
    trace = trace_of(
        _TOKENS + LOOP.replace("optimizer.step()", "assert not loss.isnan().any(); optimizer.step()"), tmp_path
    )
    assert len(trace.steps) == 2


def test_a_loop_until_a_condition_of_tensors_ends(tmp_path: Path) -> None:
    loop = """
x = model(torch.zeros(1, 8, dtype=torch.int64)).detach()
while (x > 1).any():
    x = x * 0.5
print("ended")
"""
    assert printed_by(_TOKENS + loop, tmp_path) == ["ended"]
