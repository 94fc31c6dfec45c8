from __future__ import annotations

import sys
from pathlib import Path

import pexpect
import pytest

from meshwright import tqdm
from tests.ranks import ranks

pytest.importorskip("tqdm")

NESTED = """
import time
from meshwright import tqdm
for epoch in tqdm(range(2), desc="epochs"):
    bar = tqdm(range(30), desc="batches", leave=False)
    for batch in bar:
        bar.set_postfix(loss=0.25)
        time.sleep(0.02)
print("finished")
"""


def test_a_bar_counts_and_can_be_updated_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tqdm(range(3), desc="steps")) == [0, 1, 2]
    with tqdm(total=5) as bar:
        bar.update(5)
        bar.set_postfix(loss=1.0)
    shown = capsys.readouterr().err
    assert "steps: 100%" in shown
    assert "5/5" in shown


@ranks(2)
def test_only_one_process_of_a_host_shows_a_bar() -> None:
    from meshwright import PartialState

    quiet = tqdm(range(3))
    assert quiet.disable is not PartialState().is_local_main_process
    assert list(quiet) == [0, 1, 2]
    assert not tqdm(range(3), main_process_only=False).disable


@pytest.mark.parametrize("with_rich", [True, False])
def test_nested_bars_in_a_terminal_show_their_postfix(tmp_path: Path, with_rich: bool) -> None:
    if with_rich:
        pytest.importorskip("rich")
    hidden = "" if with_rich else "import sys; sys.modules['rich'] = None\n"
    (tmp_path / "script.py").write_text(hidden + NESTED)
    terminal = pexpect.spawn(sys.executable, [str(tmp_path / "script.py")], dimensions=(24, 100), timeout=300)
    terminal.expect("loss=0.25")
    terminal.expect("finished")
    shown = terminal.before.decode()
    assert "epochs" in shown
    assert ("━" in shown) is with_rich
    assert "Warning" not in shown
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        tqdm(range(3))
