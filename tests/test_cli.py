"""The command line: every kind of bad input is one line and exit status 2, before any work; never a traceback."""
import contextlib
import io
import json
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import matplotlib
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import generate_chunked
import generate_dynamic
import generate_interleaved
import generate_naive
import generate_prepacked
import generate_ragged
import generate_unbatched
from scheduler import Request
from toolbox import cli
from toolbox.load import load
from toolbox.progress import Progress

ROOT = Path(__file__).parent.parent
STAGES = [generate_unbatched, generate_naive, generate_dynamic, generate_chunked, generate_interleaved, generate_prepacked, generate_ragged]


def run(stage, *flags):
    """(exit status, stdout, stderr) of a stage script with these flags, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        cli.main(stage.generate, stage.__doc__, [str(flag) for flag in flags])
    return stop.value.code, out.getvalue(), err.getvalue()


def refused(message, *flags, stage=generate_interleaved):
    code, out, err = run(stage, *flags)
    assert code == 2 and message in err and err.count("\n") == 1 and "Traceback" not in err, (code, err)
    assert "stage:" not in out


@pytest.mark.parametrize("flags, message", [
    (["--model", "gpt3"], "model 'gpt3': no such file or folder, and none of the names builtin, gpt2"),
    (["--model", "tests"], "model 'tests': the folder holds neither"),
    (["--model", "README.md"], "neither .safetensors nor .bin"),
    (["--prompts", "missing.txt"], "--prompts missing.txt: No such file"),
    (["--prompts", "tests"], "--prompts tests: Is a directory"),
    (["--prompts", "toolbox/builtin/model.safetensors"], "not a text file in UTF-8"),
    (["--prompt", "a", "--prompts", "b"], "--prompt and --prompts"),
    (["--prompt", ""], "request 'r0': the prompt is empty"),
    (["--prompt", "word " * 400], "request 'r0': prompt of 800 tokens does not fit block_size 256"),
    (["--max_new_tokens", "0"], "max_new_tokens must be a whole number of at least 1, not 0"),
    (["--max_new_tokens", "many"], "--max_new_tokens"),
    (["--temperature", "nan"], "temperature must be a number of at least 0, not nan"),
    (["--temperature", "-1"], "temperature must be a number of at least 0, not -1.0"),
    (["--top_k", "0"], "top_k must be a whole number of at least 1, not 0"),
    (["--max_batch", "0"], "max_batch must be a whole number of at least 1, not 0"),
    (["--token_budget", "-3"], "token_budget must be a whole number of at least 1, not -3"),
    (["--max_kv_tokens", "0"], "max_kv_tokens must be a whole number of at least 1, not 0"),
    (["--policy", "lifo"], "--policy"),
    (["--admission", "hope"], "--admission"),
    (["--page_size", "0"], "page_size must be a whole number of at least 1, not 0"),
    (["--arrival_rate", "0"], "--arrival_rate must be above 0, not 0.0"),
    (["--arrival_rate", "nan"], "--arrival_rate must be above 0, not nan"),
    (["--max_kv_tokens", "60"], "KV tokens, max_kv_tokens is 60"),
    (["--device", "cuda"], "--device cuda: there is no CUDA device here, allowed are cpu and auto"),
    (["--device", "mps"], "--device mps: there is no Apple GPU here"),
    (["--device", "tpu"], "--device"),
    (["--dtype", "int8"], "--dtype"),
    (["--plot", "no/such/folder/x.png"], "--plot no/such/folder/x.png: there is no folder no/such/folder"),
    (["--plot", "x.docx"], "--plot x.docx: the name must end in .png, .pdf, .svg"),
    (["--plot", "tests"], "--plot tests: the name must end in"),
    (["--trace", "no/such/folder/x.json"], "--trace no/such/folder/x.json: there is no folder"),
    (["--trace", "tests"], "--trace tests: is a folder"),
    (["--no_such_flag"], "unrecognized arguments: --no_such_flag"),
    (["--max_bat", "3"], "unrecognized arguments: --max_bat 3"),
])
def test_bad_flags(flags, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.chdir(ROOT)
    refused(message, *flags)


def test_float64_on_an_apple_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    refused("--dtype float64: an Apple GPU has none", "--device", "mps", "--dtype", "float64")
    code, out, err = run(generate_ragged, "--dtype", "float64", "--max_new_tokens", 2)
    assert code == 0 and out.count("an Apple GPU has no float64: running on the CPU") == 1


@pytest.mark.parametrize("text, message", [
    ("", "there is no prompt in it"),
    ("\n\n  \n", "there is no prompt in it"),
])
def test_bad_text_files(text, message, tmp_path):
    (tmp_path / "p.txt").write_text(text)
    refused(message, "--prompts", tmp_path / "p.txt")


@pytest.mark.parametrize("line, message", [
    ("{", "line 2: not JSON"),
    ("[1]", 'line 2: not an object with a "prompt" that is a text'),
    ("{}", 'line 2: not an object with a "prompt"'),
    ('{"prompt": 3}', 'line 2: not an object with a "prompt"'),
    ('{"prompt": "a", "tempreature": 1}', 'line 2: unknown key "tempreature", allowed are prompt, max_new_tokens'),
    ('{"prompt": ""}', "line 2: request 'r1': the prompt is empty"),
    ('{"prompt": "a", "name": "x", "max_new_tokens": 0}', "line 2: request 'x': max_new_tokens must be"),
    ('{"prompt": "a", "max_new_tokens": "3"}', "line 2: request 'r1': max_new_tokens must be a whole number of at least 1, not '3'"),
    ('{"prompt": "a", "arrival": -1}', "line 2: request 'r1': arrival"),
    ('{"prompt": "a", "temperature": NaN}', "line 2: request 'r1': temperature"),
    ('{"prompt": "a", "seed": [1]}', "line 2: request 'r1': seed must be a whole number"),
    ('{"prompt": "a", "name": "r0"}', "request 'r0' is there 2 times"),
    ('{"prompt": "a", "name": 7}', "line 2: request: name must be a text, not 7"),
    ("[" * 100_000, "line 2: not JSON (nested too deeply)"),
])
def test_bad_json_lines(line, message, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "# a"}\n' + line + "\n")
    refused(message, "--prompts", tmp_path / "p.jsonl")


def test_json_lines_say_what_each_request_wants(tmp_path):
    lines = [{"prompt": "# json", "max_new_tokens": 3, "temperature": 0, "name": "first"}, {"prompt": "# os", "seed": 9, "arrival": 4, "priority": 2, "top_k": 5}]
    (tmp_path / "p.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    code, out, err = run(generate_ragged, "--prompts", tmp_path / "p.jsonl", "--max_new_tokens", 5, "--trace", tmp_path / "t.json")
    assert code == 0 and "--- first: " in out and "2/2 requests identical" in out
    trace = json.loads((tmp_path / "t.json").read_text())
    assert [r["name"] for r in trace["requests"]] == ["first", "r1"] and [r["arrival"] for r in trace["requests"]] == [0, 4]
    assert len(trace["requests"][0]["generated"]) <= 3 and trace["requests"][1]["token_steps"][0] >= 4
    assert trace["totals"]["useful"] == sum(p["useful"] for p in trace["passes"])


def test_text_files_of_any_kind(tmp_path):
    for text in "a b\n\nc", "a b\r\n\r\n\r\nc\r\n", "\ufeffa b\n \t \nc\n\n":
        (tmp_path / "p.txt").write_bytes(text.encode())
        code, out, err = run(generate_ragged, "--prompts", tmp_path / "p.txt", "--max_new_tokens", 2)
        assert code == 0 and re.findall(r"^(.*)▸", out, re.M) == ["a b", "c"], out


@pytest.mark.parametrize("stage", STAGES)
def test_a_flag_without_meaning_is_ignored_and_says_so(stage):
    flags = {"max_batch": 2, "token_budget": 9, "max_kv_tokens": 200, "policy": "sjf", "admission": "grow", "page_size": 4, "attention": "mask"}
    code, out, err = run(stage, "--prompt", "# a", "--max_new_tokens", 2, *[x for knob, value in flags.items() for x in (f"--{knob}", value)], "--no_cache")
    assert code == 0
    import inspect
    for knob in [*flags, "use_cache"]:
        line = f"--{'no_cache' if knob == 'use_cache' else knob} has no meaning for this stage: ignored"
        assert (line in out) == (knob not in inspect.signature(stage.generate).parameters)


@pytest.mark.parametrize("stage", STAGES)
def test_help_tells_the_idea_and_groups_the_flags(stage):
    code, out, err = run(stage, "--help")
    assert code == 0 and all(group in out for group in ("what to generate", "how to batch", "where", "what to show"))
    assert " ".join(stage.__doc__.split("\n\n")[0].split())[:40] in " ".join(out.split()) and "None" not in out


@pytest.mark.parametrize("stage", STAGES)
def test_plot_and_trace_are_written(stage, tmp_path):
    code, out, err = run(stage, "--prompt", "# a", "--prompt", "# json\nLoad a file", "--max_new_tokens", 4, "--plot", tmp_path / "x.png", "--trace", tmp_path / "x.json", "--quiet")
    assert code == 0 and "▸" not in out and err == ""
    pixels = matplotlib.image.imread(tmp_path / "x.png")
    assert pixels.shape[0] > 200 and pixels[..., :3].std() > 0.05
    assert json.loads((tmp_path / "x.json").read_text())["stage"]


def test_pressure_by_flags(tmp_path):
    """Everything at once: the outputs are the same, the report tells what it took."""
    flags = ["--quiet", "--max_kv_tokens", 256, "--admission", "grow", "--page_size", 8, "--policy", "priority", "--arrival_rate", 0.5]
    for stage in generate_chunked, generate_interleaved, generate_ragged:
        code, out, err = run(stage, *flags, "--trace", tmp_path / "t.json")
        assert code == 0 and "12/12 requests identical" in out and re.search(r"preemptions +[1-9]", out)
        arrivals = [r["arrival"] for r in json.loads((tmp_path / "t.json").read_text())["requests"]]
        assert arrivals == sorted(arrivals) and 10 < arrivals[-1] < 50   # twelve at 0.5 a step, a function of the seed
    same = [part for i in range(4) for part in ("--prompt", "# json.load\nRead a file, " + "x" * i)]
    code, out, err = run(generate_ragged, "--quiet", "--prefix_cache", "--page_size", 4, "--max_batch", 1, "--max_new_tokens", 3, *same)
    assert code == 0 and re.search(r"prefix cache +3 hits, [1-9]\d* tokens saved", out)


def test_rows_are_measured_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "forward_times", partial(cli.forward_times, rows=(1, 2, 4), repeats=1))
    code, out, err = run(generate_unbatched, "--rows", tmp_path / "rows.png")
    assert code == 0 and "ms per row" in out and (tmp_path / "rows.png").stat().st_size > 10_000
    refused("unrecognized arguments: --rows", "--rows")


def test_all_stages_as_a_table(capsys):
    from toolbox import ladder
    assert cli.compare(ladder.__doc__, ["--prompt", "# a", "--prompt", "# json\nLoad a file", "--max_new_tokens", "4", "--repeats", "1", "--max_batch", "2"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ladder.STAGES) and "10 stages: each of 2 requests identical to unbatched" in out
    cli.compare(ladder.__doc__, ["--prompt", "# a", "--max_new_tokens", "2", "--repeats", "1", "--no_cache", "--attention", "mask", "--trace", "t.json"])
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if "where all stages run: ignored" in line] == ["--attention", "--no_cache", "--trace"]
    assert cli.compare(ladder.__doc__, ["--repeats", "0"]) == 2 and "--repeats must be at least 1" in capsys.readouterr().err


def test_what_optimize_changes_does_not_check_itself(monkeypatch, capsys):
    from toolbox import kernels, ladder
    flags = ["--optimize", "--prompt", "# json\nLoad a file", "--max_new_tokens", "4"]
    code, out, _ = run(generate_ragged, *flags)
    assert code == 0 and "1/1 requests identical to unbatched" in out
    assert cli.compare(ladder.__doc__, [*flags, "--repeats", "1"]) == 0
    monkeypatch.setattr(kernels.FastLinear, "forward", lambda self, x: x @ self.weight.T)   # it has lost its bias
    code, out, _ = run(generate_ragged, *flags)
    assert code == 1 and "WRONG: request 'r0': logits of token 0 differ" in out
    capsys.readouterr()
    assert cli.compare(ladder.__doc__, [*flags, "--repeats", "1"]) == 1
    out = capsys.readouterr().out
    assert all(f"WRONG: {name}: request 'r0'" in out for name in ladder.STAGES)


def test_interrupted_prints_what_is_finished_and_leaves_with_130(monkeypatch):
    calls = []

    def sample(*args, original=generate_interleaved.sample):
        calls.append(1)
        if len(calls) == 30:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(generate_interleaved, "sample", sample)
    code, out, err = run(generate_interleaved)
    done = out.count("--- r")
    assert code == 130 and 0 < done < 12 and f"{done} of 12 requests were finished" in out and "interrupted" in err and "Traceback" not in err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")
def test_control_c(tmp_path):
    process = subprocess.Popen([sys.executable, "generate_unbatched.py", "--no_cache", "--temperature", "0", "--max_new_tokens", "250", "--no_check"],
                               cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))   # a shell's background job ignores it, and so would its children
    assert process.stderr.readline().startswith("r0: ")   # at least one is done
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "requests were finished" in out and "Traceback" not in err, err


FLAG = {
    "--max_new_tokens": st.sampled_from([1, 2, 5, 0, -1, "x", 10**20]), "--max_batch": st.sampled_from([1, 3, 0, "", 10**20]),
    "--token_budget": st.sampled_from([1, 7, 0, -5, "1.5", 10**20]), "--max_kv_tokens": st.sampled_from([1, 60, 300, 0, "nan"]),
    "--temperature": st.sampled_from([0, 0.7, 1e-300, 1e300, "nan", "inf", -1, "hot"]), "--top_k": st.sampled_from([1, 5, 10**9, 0, -1]),
    "--policy": st.sampled_from(["sjf", "x"]), "--admission": st.sampled_from(["grow", "reserve"]), "--page_size": st.sampled_from([1, 7, 0, 10**9]),
    "--arrival_rate": st.sampled_from([0.1, 1e9, 1e-9, 1e-300, 0, "nan", "inf"]), "--seed": st.sampled_from([0, -7, 2**70, "s"]), "--attention": st.sampled_from(["mask", "varlen", "flash"]),
    "--dtype": st.sampled_from(["float32", "float64", "bfloat16", "float8"]), "--prompt": st.text(max_size=40), "--model": st.sampled_from(["builtin", "x"]),
}


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(stage=st.sampled_from(STAGES), flags=st.lists(st.sampled_from(sorted(FLAG)).flatmap(lambda f: st.tuples(st.just(f), FLAG[f])), max_size=5), content=st.one_of(
    st.none(), st.binary(max_size=60), st.text(max_size=60).map(str.encode),
    st.lists(st.dictionaries(st.sampled_from(["prompt", "seed", "name", "arrival", "max_new_tokens", "temperature", "top_k", "priority", "odd"]),
                             st.one_of(st.text(max_size=8), st.integers(-3, 9), st.none(), st.floats()), max_size=4), max_size=3)
    .map(lambda lines: "\n".join(map(json.dumps, lines)).encode())), jsonl=st.booleans())
def test_fuzz_never_a_traceback(stage, flags, content, jsonl, tmp_path):
    arguments = [f"{flag}={value}" for flag, value in flags]
    if content is not None and not any(flag == "--prompt" for flag, _ in flags):
        path = tmp_path / ("p.jsonl" if jsonl else "p.txt")
        path.write_bytes(content)
        arguments.append(f"--prompts={path}")
    elif not any(flag == "--prompt" for flag, _ in flags):
        arguments.append("--prompt=# a")
    if not any(flag == "--max_new_tokens" for flag, _ in flags):
        arguments.append("--max_new_tokens=3")
    code, out, err = run(stage, *arguments)
    assert code in (0, 2), (code, out, err)
    if code == 2:
        assert len(err.splitlines()) == 1, err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_live_progress_on_a_terminal():
    model, tokenizer = load()
    requests = [Request(tokenizer.encode(text), 12, 0.7, name=name, arrival=arrival)
                for name, text, arrival in [("short", "# a", 0), ("long", "# json\n" + "Load a file. " * 15, 0), ("late", "# b", 6)]]
    screen = Terminal()
    with Progress(model, requests, tokenizer, token_budget=16, stream=screen, every=0.0):
        generate_interleaved.generate(model, requests, max_batch=2, token_budget=16)
    frames = screen.getvalue().split("\x1b[J")
    assert any("budget 16/16 [####################]" in frame for frame in frames)
    assert any(re.search(r"long +prefilling +\d+/\d+", frame) for frame in frames)
    assert any(re.search(r"short +decoding +\d+/12 +\.\.\. \S", frame) for frame in frames)
    assert any(re.search(r"late +waiting .*arrives at step 6", frame) for frame in frames)
    assert "0 decoding, 0 prefilling, 0 waiting, 3 done" in frames[-1]
    assert not model._forward_pre_hooks   # it leaves nothing behind


def test_progress_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "8")
    model, tokenizer = load()
    requests = [Request([5], 2, name=f"r{i}") for i in range(30)]
    lines = Progress(model, requests, tokenizer, stream=Terminal()).frame("x")
    assert len(lines) == 6 and max(map(len, lines)) < 40 and "and 26 more" in lines[-1]
