"""Each script as a reader runs it."""
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.name for path in ROOT.glob("generate_*.py"))


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=120,
                          env={"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "2"})


def test_there_are_all_of_them():
    assert SCRIPTS == [f"generate_{stage}.py" for stage in ("chunked", "dynamic", "interleaved", "naive", "ragged", "unbatched")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_with_its_defaults(script):
    result = run(script)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("--- r") == 12 and "<|endoftext|>" in result.stdout
    for word in "forward passes", "useful tokens", "pad slots", "tokens/s", "TTFT", "ITL", "12/12 requests identical to unbatched":
        assert word in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("flags", [["--temperature", "0"], ["--max_batch", "1"], ["--token_budget", "3"]], ids=" ".join)
def test_with_flags(script, flags):
    result = run(script, *flags)
    assert result.returncode == 0 and "12/12 requests identical to unbatched" in result.stdout, result.stdout + result.stderr
    knobless = {"--max_batch": ["generate_unbatched.py"], "--token_budget": ["generate_unbatched.py", "generate_naive.py", "generate_dynamic.py"]}
    assert ("ignored" in result.stdout) == (script in knobless.get(flags[0], []))


def test_exit_status_1_if_a_request_is_wrong():
    """The published mask, put back: the script itself must say so."""
    code = ("import sys, runpy, cache; old = cache.Rectangle.__init__\n"
            "def published(self, *args):\n    old(self, *args); self.mask[..., self.P:] = True\n"
            "cache.Rectangle.__init__ = published\n"
            "sys.argv = ['generate_interleaved.py']; runpy.run_path('generate_interleaved.py', run_name='__main__')")
    result = run("-c", code)
    assert result.returncode == 1 and "WRONG: request 'r" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("flags, message", [
    (["--model", "gpt3"], "model 'gpt3': no such file or folder"),
    (["--prompts", "missing.txt"], "--prompts missing.txt"),
    (["--max_new_tokens", "0"], "max_new_tokens must be a whole number of at least 1"),
    (["--temperature", "nan"], "temperature must be a number of at least 0"),
    (["--top_k", "0"], "top_k"),
    (["--max_batch", "0"], "max_batch must be a whole number of at least 1"),
    (["--token_budget", "-3"], "token_budget"),
    (["--max_kv_tokens", "60"], "max_kv_tokens is 60"),
    (["--prompt", ""], "the prompt is empty"),
    (["--prompt", "word " * 400], "does not fit block_size 256"),
    (["--device", "cuda"], "no CUDA device"),
])
def test_bad_input_is_one_line_and_exit_status_2(flags, message, monkeypatch, capsys):
    import torch

    import generate_interleaved
    from toolbox.cli import main
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main(generate_interleaved.generate, generate_interleaved.__doc__, flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1


def test_own_prompts_and_dtypes(tmp_path, capsys):
    import generate_ragged
    from toolbox.cli import main
    (tmp_path / "mine.txt").write_text("# os.path\n\n# json\nLoad a\n\n\n\n# été\n", encoding="utf-8")
    for flags in ["--prompts", str(tmp_path / "mine.txt")], ["--prompt", "# a", "--prompt", "# b", "--prompt", "# c"]:
        for dtype in "float64", "bfloat16":
            with pytest.raises(SystemExit) as stop:
                main(generate_ragged.generate, generate_ragged.__doc__, [*flags, "--max_new_tokens", "8", "--dtype", dtype, "--attention", "mask"])
            assert stop.value.code == 0 and "3/3 requests identical" in capsys.readouterr().out


def test_training_is_reproducible_and_an_interruption_changes_nothing(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    import argparse

    import torch

    import train
    from toolbox.load import load
    documents = [("a.b", "Return the name of the thing, which is a string."), ("a.c", "Close it. It cannot be used any more.")] * 30
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
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
    assert tokenizer.n_vocab == a.config.vocab_size == 281
