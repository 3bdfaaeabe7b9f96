"""Each script as a reader runs it."""
import argparse
import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from experiments import train
from generate_dynamic import Rectangle
from toolbox.load import load

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.name for path in ROOT.glob("generate_*.py"))


@pytest.fixture
def run_here(monkeypatch):
    """A script within this process, which has already imported torch: (status, stdout, stderr)."""
    def run(script, *flags):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [script, *flags])
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with pytest.raises(SystemExit) as stop:
                runpy.run_path(script, run_name="__main__")
        return stop.value.code, out.getvalue(), err.getvalue()

    return run


@pytest.mark.parametrize("script", SCRIPTS)
def test_with_its_defaults(script, run_here):
    code, out, err = run_here(script)
    assert code == 0, out + err
    assert out.count("--- r") == 12 and "<|endoftext|>" in out
    for words in ("forward passes", "useful tokens", "pad slots", "tokens/s", "TTFT", "ITL",
                  "12/12 requests identical to unbatched"):
        assert words in out
    done = [line.split(":")[0] for line in err.splitlines()]   # plain progress
    assert sorted(done) == sorted(f"r{i}" for i in range(12))


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("flags", [["--temperature", "0", "--max_batch", "1"],
                                   ["--token_budget", "3"]], ids=" ".join)
@pytest.mark.thorough
def test_with_flags(script, flags, run_here):
    code, out, err = run_here(script, *flags)
    assert code == 0 and "12/12 requests identical to unbatched" in out, out + err


def test_exit_status_1_if_a_request_is_wrong(run_here, monkeypatch):
    """The published mask, put back: the script itself must say so."""
    lay_out = Rectangle.lay_out

    def published(self, device):
        lay_out(self, device)
        self.mask[..., self.P:] = True

    monkeypatch.setattr(Rectangle, "lay_out", published)
    code, out, err = run_here("generate_interleaved.py")
    assert code == 1 and "WRONG: request 'r" in out, out + err


@pytest.mark.thorough
def test_a_broken_pipe_is_no_traceback():
    command = f"'{sys.executable}' generate_ragged.py --quiet | head -1"
    result = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True,
                            timeout=1200)
    assert "Traceback" not in result.stderr and "stage:" in result.stdout


# --- train.py -------------------------------------------------------------------------------------

@pytest.mark.thorough
def test_training_is_reproducible_and_an_interruption_changes_nothing(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    documents = [("a.b", "Return the name of the thing, which is a string."),
                 ("a.c", "Close it. It cannot be used any more.")] * 30
    monkeypatch.setattr(train, "documents", lambda: documents)
    monkeypatch.setattr(train, "N_TOKENS", 280)
    monkeypatch.setattr(train, "SAVE_EVERY", 0)

    def args(name):
        return argparse.Namespace(out=str(tmp_path / name), steps=6, batch_size=2, lr=1e-3, seed=0)

    train.train(args("whole"))
    loss_of, calls = train.loss_of, []

    def interrupted(model, x, y):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return loss_of(model, x, y)

    monkeypatch.setattr(train, "loss_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train.train(args("parts"))
    assert (tmp_path / "parts/train_state.pt").exists()
    train.train(args("parts"))
    assert len(calls) > 4 and not (tmp_path / "parts/train_state.pt").exists()
    (a, tokenizer), (b, _) = load(tmp_path / "whole"), load(tmp_path / "parts")
    for mine, theirs in zip(a.state_dict().values(), b.state_dict().values()):
        assert torch.equal(mine, theirs)
    assert tokenizer.n_vocab == a.config.vocab_size == 281
