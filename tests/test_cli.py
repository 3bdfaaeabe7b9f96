"""
The command line. Every kind of bad input is one line and exit status 2, before any work; never a
traceback.
"""
import contextlib
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
import torch
from common import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import generate_chunked
import generate_dynamic
import generate_interleaved
import generate_naive
import generate_paged
import generate_prepacked
import generate_ragged
import generate_unbatched
from experiments import bench, ladder, overhead, prepacking, rows, train
from kernels import native
from kernels.linear import FastLinear
from model import GPTConfig
from request import Request
from toolbox import cli
from toolbox.load import load
from toolbox.progress import Progress

ROOT = Path(__file__).parent.parent
STAGES = [generate_unbatched, generate_naive, generate_dynamic, generate_chunked,
          generate_interleaved, generate_prepacked, generate_ragged, generate_paged]


def captured(main):
    """(what main() returns or exits with, stdout, stderr)"""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main()
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def run(stage, *flags):
    """(exit status, stdout, stderr) of a stage script with these flags, in this process."""
    flags = [str(flag) for flag in flags]
    return captured(lambda: cli.main(stage.generate, stage.__doc__, flags))


def run_command(module, *flags):
    """The same for a command of experiments/."""
    return captured(lambda: module.main([str(flag) for flag in flags]))


def refused(message, *flags, stage=generate_paged):
    code, out, err = run(stage, *flags)
    assert code == 2, (code, err)
    assert message in err and err.count("\n") == 1 and "Traceback" not in err, err
    assert "stage:" not in out


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


# --- bad flags and files --------------------------------------------------------------------------

@pytest.mark.parametrize("flags, message", [
    (["--model", "gpt3"],
     "model 'gpt3': no such file or folder, and none of the names builtin, gpt2"),
    (["--model", "tests"], "model 'tests': the folder holds neither"),
    (["--model", "README.md"], "neither .safetensors nor .bin"),
    (["--prompts", "missing.txt"], "--prompts missing.txt: No such file"),
    (["--prompts", "tests"], "--prompts tests: Is a directory"),
    (["--prompts", "toolbox/builtin/model.safetensors"], "not a text file in UTF-8"),
    (["--prompt", "a", "--prompts", "b"], "--prompt and --prompts"),
    (["--prompt", ""], "request 'r0': the prompt is empty"),
    (["--prompt", "word " * 400], "request 'r0': prompt of 800 tokens does not fit block_size 256"),
    (["--max_new_tokens", "0"], "--max_new_tokens must be a whole number of at least 1, not 0"),
    (["--max_new_tokens", "many"], "--max_new_tokens"),
    (["--temperature", "nan"], "--temperature must be a number of at least 0, not nan"),
    (["--temperature", "-1"], "--temperature must be a number of at least 0, not -1.0"),
    (["--top_k", "0"], "--top_k must be a whole number of at least 1, not 0"),
    (["--max_batch", "0"], "--max_batch must be a whole number of at least 1, not 0"),
    (["--token_budget", "-3"], "--token_budget must be a whole number of at least 1, not -3"),
    (["--max_kv_tokens", "0"], "--max_kv_tokens must be a whole number of at least 1, not 0"),
    (["--pages", "0"], "--pages must be a whole number of at least 1, not 0"),
    (["--pages", "many"], "--pages"),
    (["--pages", "3"], "needs 6 pages of 16 tokens, pages is 3"),
    (["--page_size", "0"], "--page_size must be a whole number of at least 1, not 0"),
    (["--share_prefixes", "--no_share_prefixes=1"], "--no_share_prefixes"),
    (["--policy", "lifo"], "--policy"),
    (["--arrival_rate", "0"], "--arrival_rate must be above 0, not 0.0"),
    (["--arrival_rate", "nan"], "--arrival_rate must be above 0, not nan"),
    (["--device", "cuda"], "--device cuda: there is no CUDA device here; use cpu or auto"),
    (["--device", "mps"], "--device mps: there is no Apple GPU here"),
    (["--device", "tpu"], "--device"),
    (["--dtype", "int8"], "--dtype"),
    (["--plot", "no/such/folder/x.png"],
     "--plot no/such/folder/x.png: there is no folder no/such/folder"),
    (["--plot", "x.docx"], "--plot x.docx: the name must end in .png, .pdf, .svg"),
    (["--plot", "tests"], "--plot tests: the name must end in"),
    (["--trace", "no/such/folder/x.json"],
     "--trace no/such/folder/x.json: there is no folder"),
    (["--trace", "tests"], "--trace tests: is a folder"),
    (["--page", "run.pdf"], "--page run.pdf: the name must end in .html"),
    (["--no_such_flag"], "unrecognized arguments: --no_such_flag"),
    (["--max_bat", "3"], "unrecognized arguments: --max_bat 3"),
    (["--admission", "grow"], "unrecognized arguments: --admission grow"),
    (["--rows", "x.png"], "unrecognized arguments: --rows x.png"),
])
def test_bad_flags(flags, message, no_gpu, monkeypatch):
    monkeypatch.chdir(ROOT)
    refused(message, *flags)


def test_too_little_memory_to_reserve():
    refused("KV tokens, max_kv_tokens is 60", "--max_kv_tokens", 60, stage=generate_ragged)


def test_float64_on_an_apple_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    refused("--dtype float64: an Apple GPU has none", "--device", "mps", "--dtype", "float64")
    code, out, err = run(generate_ragged, "--dtype", "float64", "--max_new_tokens", 2)
    assert code == 0
    assert out.count("an Apple GPU has no float64: running on the CPU") == 1


@pytest.mark.parametrize("line, message", [
    ("{", "line 2: not JSON"),
    ("[1]", 'line 2: not an object whose "prompt" is a string'),
    ("{}", 'line 2: not an object whose "prompt"'),
    ('{"prompt": 3}', 'line 2: not an object whose "prompt"'),
    ('{"prompt": "a", "tempreature": 1}',
     'line 2: unknown key "tempreature"; allowed: prompt, max_new_tokens'),
    ('{"prompt": ""}', "line 2: request 'r1': the prompt is empty"),
    ('{"prompt": "a", "name": "x", "max_new_tokens": 0}',
     "line 2: request 'x': max_new_tokens must be"),
    ('{"prompt": "a", "max_new_tokens": "3"}',
     "line 2: request 'r1': max_new_tokens must be a whole number of at least 1, not '3'"),
    ('{"prompt": "a", "arrival": -1}', "line 2: request 'r1': arrival"),
    ('{"prompt": "a", "temperature": NaN}', "line 2: request 'r1': temperature"),
    ('{"prompt": "a", "seed": [1]}', "line 2: request 'r1': seed must be a whole number"),
    ('{"prompt": "a", "name": "r0"}', "request 'r0' appears 2 times"),
    ('{"prompt": "a", "name": 7}', "line 2: request: name must be a string, not 7"),
    ("[" * 100_000, "line 2: not JSON (nested too deeply)"),
])
def test_bad_json_lines(line, message, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "# a"}\n' + line + "\n")
    refused(message, "--prompts", tmp_path / "p.jsonl")


def test_a_text_file_without_a_prompt(tmp_path):
    (tmp_path / "p.txt").write_text("\n\n  \n")
    refused("there is no prompt in it", "--prompts", tmp_path / "p.txt")


# --- what flags and files do ----------------------------------------------------------------------

def test_json_lines_say_what_each_request_wants(tmp_path):
    lines = [{"prompt": "# json", "max_new_tokens": 3, "temperature": 0, "name": "first"},
             {"prompt": "# os", "seed": 9, "arrival": 4, "priority": 2, "top_k": 5}]
    file, trace_file = tmp_path / "p.jsonl", tmp_path / "t.json"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    code, out, err = run(generate_ragged, "--prompts", file, "--max_new_tokens", 5,
                         "--trace", trace_file)
    assert code == 0 and "--- first: " in out and "2/2 requests identical" in out
    trace = json.loads(trace_file.read_text())
    first, second = trace["requests"]
    assert [first["name"], second["name"]] == ["first", "r1"]
    assert [first["arrival"], second["arrival"]] == [0, 4]
    assert len(first["generated"]) <= 3 and second["token_steps"][0] >= 4
    assert trace["totals"]["useful"] == sum(p["useful"] for p in trace["passes"])


def test_text_files_of_any_kind(tmp_path):
    for text in "a b\n\nc", "a b\r\n\r\n\r\nc\r\n", "\ufeffa b\n \t \nc\n\n":
        (tmp_path / "p.txt").write_bytes(text.encode())
        code, out, err = run(generate_ragged, "--prompts", tmp_path / "p.txt",
                             "--max_new_tokens", 2)
        assert code == 0 and re.findall(r"^(.*)▸", out, re.M) == ["a b", "c"], out


@pytest.mark.parametrize("stage", STAGES)
def test_a_flag_without_meaning_is_ignored_and_says_so(stage):
    flags = {"max_batch": 2, "token_budget": 9, "max_kv_tokens": 200, "pages": 30, "page_size": 4,
             "policy": "sjf", "pack": "dataset", "attention": "mask"}
    given_flags = [part for knob, value in flags.items() for part in (f"--{knob}", value)]
    code, out, err = run(stage, "--prompt", "# a", "--max_new_tokens", 2, *given_flags,
                         "--no_cache", "--no_share_prefixes")
    assert code == 0
    flag_of = {**{knob: knob for knob in flags}, "use_cache": "no_cache",
               "share_prefixes": "no_share_prefixes"}
    has = inspect.signature(stage.generate).parameters
    for knob, flag in flag_of.items():
        line = f"--{flag} has no meaning for this stage: ignored"
        assert (line in out) == (knob not in has), line
    code, out, err = run(stage, "--prompt", "# a", "--max_new_tokens", 2, "--share_prefixes")
    assert code == 0
    assert ("--share_prefixes has no meaning" in out) == ("share_prefixes" not in has)


@pytest.mark.parametrize("stage", STAGES)
def test_help_tells_the_idea_and_groups_the_flags(stage):
    code, out, err = run(stage, "--help")
    assert code == 0 and "None" not in out
    for group in "what to generate", "how to batch", "where", "what to show":
        assert group in out
    assert " ".join(stage.__doc__.split("\n\n")[0].split())[:40] in " ".join(out.split())


@pytest.mark.parametrize("stage", [   # a rectangle with finished rows, packed rows, a stream
    pytest.param(stage, marks=[] if stage in (generate_naive, generate_prepacked, generate_paged)
                 else pytest.mark.thorough) for stage in STAGES])
def test_plot_trace_and_page_are_written(stage, tmp_path):
    code, out, err = run(stage, "--prompt", "# a", "--prompt", "# json\nLoad a file",
                         "--max_new_tokens", 4, "--plot", tmp_path / "x.png", "--quiet",
                         "--trace", tmp_path / "x.json", "--page", tmp_path / "x.html")
    assert code == 0 and "▸" not in out and err == ""
    pixels = matplotlib.image.imread(tmp_path / "x.png")
    assert pixels.shape[0] > 200 and pixels[..., :3].std() > 0.05
    assert json.loads((tmp_path / "x.json").read_text())["stage"]
    first_line = stage.__doc__.strip().splitlines()[0].replace("`", "")[:30]
    assert first_line in (tmp_path / "x.html").read_text(encoding="utf-8")


# --- too little memory, by flags: the outputs are the same, the report says what it took ----------

@pytest.mark.parametrize("policy", [
    "sjf", *(pytest.param(policy, marks=pytest.mark.thorough) for policy in ("fcfs", "priority"))])
def test_preemption_by_flags(policy, tmp_path):
    code, out, err = run(
        generate_paged, "--quiet", "--pages", 32, "--page_size", 8, "--policy", policy,
        "--arrival_rate", 0.5, "--trace", tmp_path / "t.json")
    assert code == 0 and "12/12 requests identical" in out
    assert re.search(r"preemptions +[1-9]", out) and re.search(r"recomputed +[1-9]", out)
    trace = json.loads((tmp_path / "t.json").read_text())
    assert trace["counts"]["preemptions"] > 0 and trace["totals"]["recomputed"] > 0
    arrivals = [r["arrival"] for r in trace["requests"]]
    assert arrivals == sorted(arrivals)
    assert 10 < arrivals[-1] < 50   # twelve at 0.5 per step, a function of the seed


def test_shared_pages_by_flags():
    same = [part for i in range(4)
            for part in ("--prompt", "# json.load\nRead a file, " + "x" * i)]
    flags = ["--quiet", "--page_size", 4, "--max_batch", 1, "--max_new_tokens", 3, *same]
    for shared in [], ["--share_prefixes"]:
        code, out, err = run(generate_paged, *flags, *shared)
        assert code == 0 and "4/4 requests identical" in out
        assert re.search(r"shared pages +[1-9]\d* taken from other requests, "
                         r"[1-9]\d* tokens saved, \d+ evicted", out), out
    code, out, err = run(generate_paged, *flags, "--no_share_prefixes")
    assert code == 0 and "4/4 requests identical" in out and "shared pages" not in out


def most_reserved(trace):
    """The most KV tokens that requests in a forward pass have reserved at the same time."""
    longest = {r["name"]: min(r["prompt_tokens"] + 64, 256) for r in trace["requests"]}
    running = {}   # step -> names
    for p in trace["passes"]:
        running.setdefault(p["step"], set()).update(name for name, _, _ in p["work"])
    return max(sum(longest[name] for name in names) for names in running.values())


@pytest.mark.parametrize("stage", [
    generate_ragged, *(pytest.param(stage, marks=pytest.mark.thorough)
                       for stage in (generate_chunked, generate_interleaved))])
def test_reservation_by_flags(stage, tmp_path):
    reserved, steps = [], []
    for flags in [], ["--max_kv_tokens", 256]:
        code, out, err = run(stage, "--quiet", "--arrival_rate", 0.5, *flags,
                             "--trace", tmp_path / "t.json")
        assert code == 0 and "12/12 requests identical" in out
        assert "preemptions" not in out and re.search(r"recomputed +0 ", out)
        trace = json.loads((tmp_path / "t.json").read_text())
        reserved.append(most_reserved(trace))
        steps.append(trace["passes"][-1]["step"])
    assert reserved[1] <= 256 < reserved[0] and steps[1] > steps[0]


# --- the commands of experiments/ -----------------------------------------------------------------

@pytest.mark.parametrize("flags, words", [
    (["--dtype", "float64"], ["ms per row", "float64"]),
    (["--gaps", "--quick"], ["a prompt of 192 tokens arrives", *rows.GAP_STAGES])])
def test_rows_and_gaps_are_measured_and_drawn(flags, words, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "ROWS", (1, 2, 4))
    picture, file = tmp_path / "rows.png", tmp_path / "rows.json"
    code, out, err = run_command(rows, "--plot", picture, "--json", file, *flags)
    assert code == 0 and all(word in out for word in words)
    assert picture.stat().st_size > 10_000
    points = json.loads(file.read_text())["points"]
    assert [*points] == [*rows.GAP_STAGES] if "--gaps" in flags else [
        n for n, _ in points] == [1, 2, 4]


@pytest.mark.parametrize("module, flags, message", [
    (rows, "--plot x.txt", "--plot x.txt: the name must end in"),
    (rows, "--json no/such/x.json", "--json no/such/x.json: there is no folder"),
    (rows, "--model gpt3", "model 'gpt3': no such file or folder"),
    (rows, "--device cuda", "--device cuda: there is no CUDA device here"),
    (ladder, "--repeats 0", "--repeats must be at least 1"),
    (ladder, "--pictures README.md", "--pictures README.md: "),
    (ladder, "--json no/such/x.json", "--json no/such/x.json: there is no folder"),
    (prepacking, "--memory 0", "--memory must be above 0 GB"),
    (prepacking, "--prompts no.txt", "no.txt"),
    (overhead, "--served 9", "--served must be at least 2000"),
    (overhead, "--served 2000 --json x.json", "--json needs all of them"),
    (bench, "--repeats 0", "--repeats must be at least 1"),
    (bench, "--plot x.doc", "--plot x.doc: the name must end in"),
    (bench, "--quick --systems vllm", "--systems vllm: no system has such a name; choose"),
    (bench, "--quick --peer-python vllm", "--peer-python vllm=: use NAME=PATH"),
    (bench, "--quick --peer-python vllm=/no", "--peer-python vllm=/no: use NAME=PATH"),
    (bench, "--quick --peer-python sglang=python", "with the name vllm or openvino"),
    (train, "--steps 0", "--steps must be above 0, not 0"),
    (train, "--batch_size -1", "--batch_size must be above 0"),
    (train, "--lr nan", "--lr must be above 0"),
    (train, "--out README.md", "--out README.md: "),
    (train, "--out /proc/x", "--out /proc/x: "),
])
def test_commands_refuse_bad_flags(module, flags, message, no_gpu, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(bench.MODELS, "small", GPTConfig(block_size=99, vocab_size=9, n_layer=1,
                                                         n_head=1, n_embd=4))
    monkeypatch.setattr(bench, "peers", lambda model, **knobs: {})
    code, out, err = run_command(module, *flags.split())
    assert code == 2 and message in err and err.count("\n") == 1, err


TWO_PROMPTS = ["--prompt", "# a", "--prompt", "# json\nLoad a file", "--max_new_tokens", 4]


def test_all_stages_as_a_table():
    code, out, err = run_command(ladder, *TWO_PROMPTS, "--repeats", 1, "--max_batch", 2)
    assert code == 0 and all(name in out for name in ladder.STAGES)
    assert "11 stages: each of 2 requests identical to unbatched" in out

    code, out, err = run_command(
        ladder, "--prompt", "# a", "--max_new_tokens", 2, "--repeats", 1,
        "--no_cache", "--attention", "mask", "--no_share_prefixes", "--trace", "t.json")
    said = [line.split()[0] for line in out.splitlines()
            if "where all stages run: ignored" in line]
    assert code == 0 and said == ["--attention", "--no_cache", "--trace"]


def test_what_optimize_changes_does_not_check_itself(monkeypatch):
    flags = ["--optimize", "--prompt", "# json\nLoad a file", "--max_new_tokens", 4]
    code, out, _ = run(generate_ragged, *flags)
    assert code == 0 and "1/1 requests identical to unbatched" in out
    assert "\ncompiled step: " in out
    assert run_command(ladder, *flags, "--repeats", 1)[0] == 0

    without_bias, pack = FastLinear.forward, native.pack
    monkeypatch.setattr(FastLinear, "forward",
                        lambda self, x: without_bias(self, x) - self.bias)
    monkeypatch.setattr(native, "pack", lambda weight: pack(weight) * 1.5)
    code, out, _ = run(generate_ragged, *flags)
    assert code == 1 and "WRONG: request 'r0': logits of token 0 differ" in out
    code, out, _ = run_command(ladder, *flags, "--repeats", 1)
    assert code == 1 and all(f"WRONG: {name}: request 'r0'" in out for name in ladder.STAGES)


# --- interruption ---------------------------------------------------------------------------------

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
    assert code == 130 and 0 < done < 12 and f"{done} of 12 requests were finished" in out
    assert "interrupted" in err and "Traceback" not in err


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")
def test_control_c(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "# a", "max_new_tokens": 3}\n' + '{"prompt": "# b"}\n' * 9)
    process = subprocess.Popen(
        [sys.executable, "generate_unbatched.py", "--prompts", file, "--no_cache", "--no_check",
         "--temperature", "0", "--max_new_tokens", "250"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
        # a shell's background job ignores the signal, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stderr.readline().startswith("r0: ")   # at least one is done
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130 and "of 10 requests were finished" in out, err
    assert "Traceback" not in err, err


def test_a_reader_who_has_read_enough():
    """As `| head -1`: the pipe is closed when the next line comes."""
    reading, writing = os.pipe()
    with open(writing, "w") as out, contextlib.redirect_stdout(out):
        os.close(reading)
        assert cli.guarded("x", lambda: print("line", flush=True)) == 1
        print("and no error later, when Python ends", flush=True)


# --- any flags, any files -------------------------------------------------------------------------

FLAG = {   # a flag -> its values; None: without a value
    "--max_new_tokens": [1, 2, 5, 0, -1, "x", 10**20],
    "--max_batch": [1, 3, 0, "", 10**20],
    "--token_budget": [1, 7, 0, -5, "1.5", 10**20],
    "--max_kv_tokens": [1, 60, 300, 0, "nan"],
    "--pages": [1, 6, 40, 0, -1, "x", 10**7],
    "--page_size": [1, 7, 0, 10**9],
    "--policy": ["fcfs", "sjf", "priority", "x"],
    "--share_prefixes": [None],
    "--no_share_prefixes": [None],
    "--pack": ["batch", "dataset", "x"],
    "--temperature": [0, 0.7, 1e-300, 1e300, "nan", "inf", -1, "hot"],
    "--top_k": [1, 5, 10**9, 0, -1],
    "--arrival_rate": [0.1, 1e9, 1e-9, 1e-300, 0, "nan", "inf"],
    "--seed": [0, -7, 2**70, "s"],
    "--attention": ["mask", "varlen", "flash"],
    "--dtype": ["float32", "float64", "bfloat16", "float8"],
    "--model": ["builtin", "x"],
}
FLAGS = st.one_of(
    st.sampled_from([(flag, value) for flag, values in FLAG.items() for value in values]),
    st.tuples(st.just("--prompt"), st.text(max_size=40)))
KEYS = st.sampled_from(["prompt", "seed", "name", "arrival", "max_new_tokens", "temperature",
                        "top_k", "priority", "odd"])
VALUES = st.one_of(st.text(max_size=8), st.integers(-3, 9), st.none(), st.floats())
JSON_LINES = st.lists(st.dictionaries(KEYS, VALUES, max_size=4), max_size=3)
CONTENTS = st.one_of(
    st.none(), st.binary(max_size=60), st.text(max_size=60).map(str.encode),
    JSON_LINES.map(lambda lines: "\n".join(map(json.dumps, lines)).encode()))


@settings(max_examples=examples(120), deadline=None, derandomize=True,
          suppress_health_check=list(HealthCheck))
@given(stage=st.sampled_from(STAGES), flags=st.lists(FLAGS, max_size=5), content=CONTENTS,
       jsonl=st.booleans())
def test_fuzz_never_a_traceback(stage, flags, content, jsonl, tmp_path):
    given_flags = [flag for flag, _ in flags]
    arguments = [flag if value is None else f"{flag}={value}" for flag, value in flags]
    if "--prompt" not in given_flags and content is not None:
        path = tmp_path / ("p.jsonl" if jsonl else "p.txt")
        path.write_bytes(content)
        arguments.append(f"--prompts={path}")
    elif "--prompt" not in given_flags:
        arguments.append("--prompt=# a")
    if "--max_new_tokens" not in given_flags:
        arguments.append("--max_new_tokens=3")
    code, out, err = run(stage, *arguments)
    assert code in (0, 2), (code, out, err)
    if code == 2:
        assert len(err.splitlines()) == 1, err


# --- progress -------------------------------------------------------------------------------------

class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_live_progress_on_a_terminal():
    model, tokenizer = load()
    requests = [Request(tokenizer.encode(text), 12, 0.7, name=name, arrival=arrival)
                for name, text, arrival in [("short", "# a", 0),
                                            ("long", "# json\n" + "Load a file. " * 15, 0),
                                            ("late", "# b", 6)]]
    screen = Terminal()
    with Progress(model, requests, tokenizer, token_budget=16, stream=screen, every=0.0):
        generate_interleaved.generate(model, requests, max_batch=2, token_budget=16)
    frames = screen.getvalue().split("\x1b[J")
    assert any("budget 16/16 [####################]" in frame for frame in frames)
    for pattern in (r"long +prefilling +\d+/\d+", r"short +decoding +\d+/12 +\.\.\. \S",
                    r"late +waiting .*arrives at step 6"):
        assert any(re.search(pattern, frame) for frame in frames), pattern
    assert "0 decoding, 0 prefilling, 0 waiting, 3 done" in frames[-1]
    assert not model._forward_pre_hooks   # it leaves nothing behind


def test_progress_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "8")
    model, tokenizer = load()
    requests = [Request([5], 2, name=f"r{i}") for i in range(30)]
    lines = Progress(model, requests, tokenizer, stream=Terminal()).frame("x")
    assert len(lines) == 6 and max(map(len, lines)) < 40 and "and 26 more" in lines[-1]
