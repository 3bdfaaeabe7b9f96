"""
The command line, and each script as a reader runs it. Every kind of bad input is one line and exit
status 2, before any work; never a traceback.
"""
import contextlib
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest
import torch
from common import RIGHT, ROOT, as_program, captured, examples, refused
from hypothesis import given, settings
from hypothesis import strategies as st

import generate_interleaved
import generate_paged
import generate_prefix
import generate_ragged
from beyond import prepacked
from beyond.fairness import POLICIES
from lab import compiled, flags
from lab import run as command_line
from lab.compiled import native
from lab.experiments import __main__ as experiments
from lab.flags import NUMBERS as KNOB_NUMBERS
from lab.loading.load import SMALL, load, set_threads
from lab.loading.stages import SCRIPTS
from lab.loading.workload import KEYS, read_prompts
from lab.server.__main__ import prepared
from lab.views.progress import progress
from model import GPT
from request import Request

STAGES = [*(sys.modules[generate.__module__] for generate in SCRIPTS.values()), prepacked]


def run(stage, *argv):
    """(exit status, stdout, stderr) of a stage with these flags."""
    return captured(command_line.main, stage.generate, stage.__doc__, [*map(str, argv)])


@pytest.mark.parametrize("stage", STAGES)
def test_each_script_with_its_defaults(stage):
    """In the quick size with shorter answers."""
    short = [] if os.environ.get("THOROUGH") else ["--max_new_tokens", "12"]
    code, out, err = captured(as_program, stage.__name__, *short)
    assert code == 0, out + err
    assert re.findall("^--- (.*?):? ", out, re.M) == ["r0", "r1", "r2", "and"]
    assert "\n--- and 9 more: --texts prints them\n" in out
    *_, verdict, further = out.splitlines()
    assert verdict.startswith(f"12/12 {RIGHT}")
    assert re.search(r"^  limits  +(max_batch \d+|one request)", out, re.M)
    assert out.count("\n  buys ") == out.count("\n> ") == (stage is not prepacked)
    assert "throughput" in out and further.startswith("Next: ") and "no batching knob" in further
    assert len(further) < 80   # a terminal's line
    done = [line.split(":")[0] for line in err.splitlines()]   # plain progress
    assert sorted(done) == sorted(f"r{i}" for i in range(12))


# --- bad input ------------------------------------------------------------------------------------

PREFIX = "generate_prefix.py --device cpu"
BAD = [   # what is called, and what its error says
    (f"{PREFIX} --model gpt3", "model 'gpt3' .. builtin"),
    (f"{PREFIX} --prompts missing.txt", "--prompts missing.txt: No such file"),
    (f"{PREFIX} --prompt a --prompts b", "--prompt and --prompts"),
    (f"{PREFIX} --prompt ''", "request 'r0': the prompt is empty"),
    (f"{PREFIX} --prompt '{'word ' * 400}'", "request 'r0': .. 800 tokens .. block_size 256"),
    *((f"{PREFIX} --{number} 0", f"--{number} .. at least 1, not 0")
      for number in ("max_new_tokens", "top_k", "threads")),
    *((f"{PREFIX} --{number} {bad}", f"--{number}: must be a whole number of at least 1, not {bad}")
      for number in KNOB_NUMBERS for bad in (0, "x")),
    (f"{PREFIX} --max_batch {10**20}", "max_batch must be at most 9223372036854775807"),
    (f"{PREFIX} --pages 3", "request 'r .. KV tokens, there are 48"),
    (f"{PREFIX} --page left.html --temperature nan", "--temperature .. at least 0, not nan"),
    (f"{PREFIX} --top_p 0", "--top_p .. above 0 and at most 1, not 0.0"),
    (f"{PREFIX} --arrival_rate 0", "--arrival_rate must be above 0"),
    (f"{PREFIX} --policy lifo", "--policy .. 'lifo'"),
    (f"{PREFIX} --chat", "--chat: this model has no chat template"),
    (f"{PREFIX} --device cuda", "--device cuda .. use cpu"),
    (f"{PREFIX} --device mps --dtype float64", "--device mps .. float64; use cpu"),
    (f"{PREFIX} --plot x.docx", "--plot x.docx .. .png, .pdf, .svg"),
    (f"{PREFIX} --page run.pdf", "--page .. .html"),
    (f"{PREFIX} --trace no/such/x.json", "--trace no/such/x.json: No such file"),
    (f"{PREFIX} --page {'x' * 300}.html", ".html: File name too long"),
    (f"{PREFIX} --max_bat 3", "unrecognized arguments: --max_bat 3"),
    (f"{PREFIX} --threads {10**20}", "--threads: must be at most .. this machine's cores"),
    ("beyond.prepacked --pack rows", "--pack: invalid choice: 'rows' (choose from .. dataset"),
    ("beyond.speculative nowhere", "model 'nowhere': no such file"),
    ("beyond.sessions --keep 3", "unrecognized arguments: --keep 3"),
    ("beyond.tensor_parallel", "torchrun --nproc_per_node 2 -m beyond.tensor_parallel"),
    *((f"lab/simulate/__main__.py --rate {bad}", f"--rate: must be above 0, not {bad}")
      for bad in ("nan", "x")),
    ("lab/simulate/__main__.py --rate 'a\nb'", "--rate: must be above 0, not a b"),
    ("lab/simulate/__main__.py --json no/x.json", "--json no/x.json: No such file"),
    ("lab/server/__main__.py --port 99999", "--port must be 0 to 65535"),
    *((f"lab/experiments/__main__.py {flags}", said) for flags, said in (
        ("nix", "invalid choice: 'nix' (choose from .. bench"),
        ("bench --systems nix", "ragged"), ("rows --json no/x.json", "--json no/x.json"),
        ("gaps --model nix", "nix"), ("bench --model nix", "nix"),
        ("train --steps 0", "--steps"), ("train --out README.md", "--out"))),
]


@pytest.mark.parametrize("line, said", BAD)
def test_bad_input_is_one_line(line, said, monkeypatch):
    """On a machine with an Apple GPU, which has no float64."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(os, "_exit", sys.exit)   # of ranks
    out = refused(said, as_program, *shlex.split(line))
    assert "stage:" not in out   # before any work
    assert not Path("left.html").exists()


@pytest.mark.parametrize("first, second", [
    ("plot same.png", "trace same.png"), ("page x.html", "trace ./x.html"),
    ("plot link.png", "trace file.txt"), ("prompts p.txt", "trace p.txt")])
def test_one_file_for_two_things_loses_neither(first, second, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("a prompt")
    Path("file.txt").write_text("something")
    Path("link.png").symlink_to("file.txt")
    one, other = first.split()[0], second.split()[0]
    refused(f"--{one} and --{other}: .. is one file", command_line.main, generate_ragged.generate,
            "", f"--{first} --{second} --max_new_tokens 1".split())
    assert Path("p.txt").read_text() == "a prompt"
    assert Path("file.txt").read_text() == "something"
    assert not Path("same.png").exists() and not Path("x.html").exists()


def test_a_folder_that_may_not_be_entered(monkeypatch):
    def stat(*_, **settings):
        raise PermissionError(13, "Permission denied")

    args = command_line.parser("").parse_args(["--page", "secret/x.html"])
    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(ValueError, match="^--page secret/x.html: Permission denied$"):
        command_line.load_inputs(args)


@pytest.mark.parametrize("line, said", [
    ("{", "not JSON"), ("[" * 100_000, "not JSON: RecursionError"),
    ("[1]", '.. "prompt" is a string'), ('{"prompt": 3}', '.. "prompt" is a string'),
    ('{"prompt": "a", "tempreature": 1}', '.. key "tempreature"; allowed: prompt, '),
    ('{"prompt": "", "name": "x"}', "request 'x': the prompt is empty"),
    ('{"prompt": "a", "arrival": -1}', "request 'r1': arrival"),
    ('{"prompt": "a", "name": "r0"}', "request 'r0': another one has this name"),
    (r'{"prompt": "a", "name": "b\n"}', r"request: name .. not 'b\n'"),
    ('{"prompt": "a", "top_p": 0}', "request 'r1': top_p .. above 0"),
    ('{"prompt": "a", "temperature": true}', "request 'r1': temperature"),
    ('{"prompt": "a", "temperature": NaN}', "request 'r1': temperature"),
    ('{"prompt": "%s"}' % ("word " * 400), "request 'r1': .. block_size 256")])
def test_a_bad_line_of_a_file_is_named(line, said, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "# a", "name": "r0"}\n' + line)
    out = refused(f"p.jsonl, line 2: {said}", as_program, "generate_prefix.py", f"--prompts={file}")
    assert "stage:" not in out


@pytest.mark.parametrize("here, dtype, device", [
    (set(), "float32", "cpu"), ({"mps"}, "float32", "mps"), ({"mps"}, "float64", "cpu"),
    ({"mps", "cuda"}, "float64", "cuda")])
def test_auto_is_the_device_that_is_there(here, dtype, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in here)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in here)
    args = command_line.parser("").parse_args(["--dtype", dtype])
    assert flags.device_of(args) == torch.device(device)


@pytest.mark.parametrize("flag, small, device", [
    ("auto", SMALL, "cpu"), ("auto", 1, "cuda"), ("cuda", SMALL, "cuda")])
def test_auto_takes_a_gpu_for_a_large_model(flag, small, device, monkeypatch):
    placed = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("lab.loading.load.SMALL", small)   # the built-in model has a million
    monkeypatch.setattr(GPT, "to", lambda model, place, *_: placed.append(str(place)))
    args = command_line.parser("").parse_args(["--device", flag])
    command_line.load_inputs(args)
    prepared(args)
    assert placed == [device] * 2


@pytest.mark.parametrize("command, device", [
    (["stages"], "cpu"), (["rows"], "cpu"), (["rows", "--model", "random"], "cuda"),
    (["bench"], "cuda"), (["rows", "--device", "cuda"], "cuda")])
def test_auto_for_an_experiment_goes_by_the_name_of_its_model(command, device, monkeypatch):
    def work(args, device, dtype):
        raise ValueError(f"on {device}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=f"on {device}"):
        experiments.measure(work, None, experiments.parser().parse_args(command))


def test_a_full_disk_is_one_line_and_costs_no_text():
    def work():
        print("printed before")
        raise OSError(28, "full")

    assert captured(flags.guarded, "x.py", work) == (
        1, "printed before\n", "x.py: [Errno 28] full\n")


@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
@pytest.mark.parametrize("script", ["generate_ragged", "engine"])
def test_a_closed_stream_costs_no_run(script, closed, monkeypatch):
    """As `python generate_ragged.py >&-`: nothing is said there, and the other one is as always."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out if closed == "stderr" else None)
    monkeypatch.setattr(sys, "stderr", err if closed == "stdout" else None)
    with pytest.raises(SystemExit, match="^0$"):
        as_program(script, "--prompt", "a", "--max_new_tokens", "2")
    assert (RIGHT in out.getvalue()) == (closed == "stderr")
    assert "Traceback" not in err.getvalue()


WITHOUT_DOCSTRINGS = """if True:
    import runpy, sys
    for name in sys.argv[1:]:
        sys.argv = [name, "--help"]
        try:
            runpy.run_module(name, run_name="__main__")
        except SystemExit as stop:
            print("shown:" if not stop.code else "failed:", name)
    """


def test_python_without_docstrings():
    """-OO leaves them out, so a help has no description."""
    names = ["generate_ragged", "engine", "beyond.hybrid", "beyond.tensor_parallel", "lab.simulate",
             "lab.server", "lab.experiments"]
    done = subprocess.run([sys.executable, "-OO", "-c", WITHOUT_DOCSTRINGS, *names], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.stderr == ""
    assert re.findall("^shown: (.*)$", done.stdout, re.M) == names
    kit = subprocess.run([sys.executable, "-OO", "assignments/kit.py", "--help"], cwd=ROOT)
    assert kit.returncode == 0


@pytest.mark.parametrize("work", [lambda: torch.empty(10**15), lambda: bytearray(10**18)])
def test_too_little_memory_is_one_line(work):
    code, out, err = captured(flags.guarded, "x.py", work)
    assert code == 1 and err.startswith("x.py: not enough memory.") and err.count("\n") == 1


def test_a_fault_of_ours_is_no_lack_of_memory():
    def work():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="^mat1 and mat2"):
        flags.guarded("x.py", work)


# --- what flags and files do ----------------------------------------------------------------------

def test_json_lines_say_what_each_request_wants(tmp_path):
    lines = [{"prompt": "# json\u2028", "max_new_tokens": 3, "temperature": 0, "name": "first"},
             {"prompt": "# os", "seed": 9, "arrival": 4, "priority": 2, "top_k": 5, "top_p": 0.9}]
    file, trace_file = tmp_path / "p.jsonl", tmp_path / "t.json"
    lines += [{"prompt": "# json", "name": "r3"}, {"prompt": "# json", **dict.fromkeys(KEYS[1:])}]
    file.write_text("\r\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), "utf-8")
    code, out, err = run(generate_ragged, "--prompts", file, "--max_new_tokens", 5,
                         "--trace", trace_file)
    assert code == 0 and "--- first: " in out and f"4/4 {RIGHT}" in out
    first, second, third, last = sorted(json.loads(trace_file.read_text())["requests"],
                                        key=lambda request: request["name"])
    assert [second["name"], third["name"], last["name"]] == ["r1", "r3", "r4"]
    assert last["arrival"] == 0 and len(last["generated"]) == 5
    assert [first["arrival"], second["arrival"]] == [0, 4]
    assert len(first["generated"]) <= 3 and len(second["generated"]) == 5
    assert second["token_steps"][0] >= 4


def test_text_files_of_any_kind(tmp_path):
    for text in "a b\n\nc", "a b\r\n\r\n\r\nc\r\n", "\ufeffa b\n \t \nc\n\n":
        (tmp_path / "p.txt").write_bytes(text.encode())
        prompts = read_prompts(tmp_path / "p.txt")
        assert [each["prompt"] for each in prompts] == ["a b", "c"]
    (tmp_path / "p.txt").write_text("\n  \n")
    with pytest.raises(ValueError, match="p.txt: there is no prompt in it"):
        read_prompts(tmp_path / "p.txt")


def flags_of(stage):
    """Those of how to batch that mean something to it."""
    has = {*inspect.signature(stage.generate).parameters}
    has |= {"policy"} if stage is generate_prefix else set()   # whose schedulers share prefixes
    return {"no_cache" if knob == "use_cache" else knob for knob in flags.KNOBS if knob in has}


@pytest.mark.parametrize("stage", STAGES)
def test_flags_without_meaning_are_named_and_files_are_written(stage, tmp_path):
    knobs = {"max_batch": 2, "token_budget": 9, "max_kv_tokens": 200, "pages": 30, "page_size": 4,
             "policy": "sjf", "pack": "dataset", "attention": "mask"}
    code, out, err = run(
        stage, "--prompt", "# a", "--prompt", "# json\nLoad a file", "--max_new_tokens", 4,
        *(f"--{knob}={value}" for knob, value in knobs.items()), "--no_cache", "--quiet",
        "--plot", tmp_path / "x.png", "--trace", tmp_path / "x.json", "--page", tmp_path / "x.html")
    assert code == 0 and "▸" not in out and err == ""
    assert "buys" not in out
    ignored = re.findall(r"^--(\w+) has no meaning for this stage: ignored$", out, re.M)
    assert {*ignored} == {*knobs, "no_cache"} - flags_of(stage)
    own = [f"{name} {knobs[name]}" for name in flags.NUMBERS if name in flags_of(stage)]
    limits = ", ".join(own) or "one request at a time"
    assert re.search(f"^  limits +{limits}$", out, re.M)
    pixels = matplotlib.image.imread(tmp_path / "x.png")
    assert pixels.shape[0] > 200 and pixels[..., :3].std() > 0.05
    name = json.loads((tmp_path / "x.json").read_text())["stage"]
    first_line = stage.__doc__.strip().splitlines()[0].replace("`", "").replace("*", "")[:80]
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert first_line in page and f'"name":"{name}"' in page
    assert ('"policy":"sjf"' in page) == (stage is generate_prefix)
    for path, how in ("x.json", "JSON"), ("x.png", "a picture"), ("x.html", "for a browser"):
        assert f"wrote {tmp_path / path}, {how}\n" in out


def test_help_shows_no_marks_of_a_document():
    text = captured(as_program, "generate_dynamic", "--help")[1]
    assert "calls it continuous batching: requests" in " ".join(text.split())
    assert flags.first_paragraph("Two `a` are 2 * 3 * x, *so\nto say*: y.\n\n*z*") == (
        "Two a are 2 * 3 * x, so\nto say: y.")


def test_a_flag_that_is_ignored_does_not_change_the_table():
    table = [run(generate_ragged, "--max_new_tokens", 9, "--no_check", *flags)[1].split("\n\n")[-2]
             for flags in ([], ["--pages", 2, "--no_cache"], ["--max_kv_tokens", 200])]
    assert table[0] == table[1] != table[2] and table[0].startswith("  12 requests ")


@pytest.mark.parametrize("stage", STAGES)
def test_the_help_is_short_and_shows_this_stages_flags(stage, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(stage, "--help")
    assert code == 0 and "None" not in out and out.count("\n") <= 45
    shown = set(re.findall(r"^  --(\w+)", out, re.M))
    assert shown & {*flags.KNOBS, "no_cache"} == flags_of(stage)
    assert {"prompt", "model", "texts", "optimize"} <= shown
    told = dict(re.findall(r"--(\w+) (.*?)(?= --|$)", " ".join(out.split())))
    for flag, default in vars(command_line.parser("", stage.generate).parse_args([])).items():
        if default is not None and default is not False:
            assert f"(default: {default})" in told[flag]
    assert all(policy in told["policy"] for policy in POLICIES if "policy" in told)


@pytest.mark.parametrize("terminal, no_color, coloured", [
    (True, "", True), (True, "1", False), (False, "", False)])
def test_colour_is_for_terminals(terminal, no_color, coloured, monkeypatch):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    text = command_line.coloured("1 near-tie\nWRONG: r0")
    plain = re.sub("\x1b\\[[0-9;]*m", "", text)
    assert plain == "1 near-tie\nWRONG: r0" and text.count("\x1b[0m") == 2 * coloured


# --- what a run takes from the machine ------------------------------------------------------------

def test_a_stage_imports_what_it_uses():
    """All stages; one of them runs. Each of these costs a reader time who asked for none of it."""
    found = subprocess.run([sys.executable, "-c", """if True:
        import sys
        import generate_ragged, lab.loading.stages, lab.run
        try:
            lab.run.main(generate_ragged.generate, "", "--prompt a --max_new_tokens 2".split())
        finally:
            print("found:", *sorted({"matplotlib", "tokenizers", "lab.explorer", "lab.server",
                  "lab.simulate", "lab.compiled", "lab.experiments", "torch._dynamo"}
                  & {*sys.modules}))
        """], cwd=ROOT, capture_output=True, text=True)
    assert f"1/1 {RIGHT}" in found.stdout, found.stderr
    assert found.stdout.endswith("\nfound:\n")


def test_a_small_model_runs_on_one_thread(monkeypatch):
    """Unless told otherwise; a large one keeps the threads that torch chooses."""
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    for environment, parameters, device, threads, expected in (
            ("", SMALL - 1, "cpu", None, [1]), ("2", SMALL - 1, "cpu", None, []),
            ("", SMALL, "cpu", None, []), ("", SMALL - 1, "cuda", None, []),
            ("", SMALL, "cpu", 2, [2]), ("2", SMALL - 1, "cpu", 3, [3])):
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
        model = SimpleNamespace(device=torch.device(device),
                                parameters=lambda: [torch.empty(parameters, device="meta")])
        set_threads(model, threads)
        assert asked == expected
        asked.clear()
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    short = "--prompt", "a", "--max_new_tokens", 1, "--threads"
    assert run(generate_ragged, *short, 4)[0] == 0 and asked == [4]
    assert run(generate_ragged, *short, 5)[0] == 2 and asked == [4]


# --- too little memory, by flags: the outputs are the same, the report says what it took ----------

def test_preemption_by_flags(tmp_path):
    code, out, err = run(
        generate_prefix, "--quiet", "--pages", 32, "--page_size", 8, "--policy", "sjf",
        "--arrival_rate", 0.5, "--trace", tmp_path / "t.json")
    assert code == 0 and f"12/12 {RIGHT}" in out
    assert re.search(r"preemptions +[1-9]", out) and re.search(r"recomputed +[1-9]", out)
    arrivals = [r["arrival"] for r in json.loads((tmp_path / "t.json").read_text())["requests"]]
    assert arrivals == sorted(arrivals)
    assert 10 < arrivals[-1] < 50   # twelve at 0.5 per step, a function of the seed


def test_what_optimize_changes_does_not_check_itself(monkeypatch):
    argv = ["--optimize", "--prompt", "# json\nLoad a file", "--max_new_tokens", 4]
    code, out, _ = run(generate_ragged, *argv)
    assert code == 0 and f"1/1 {RIGHT}, bit for bit\n" in out
    assert "\ncompiled step: yes" in out
    copies = [re.search(r"copied K/V +([\d.]+) MB", run(generate_paged, *more)[1])[1]
              for more in (argv, argv[1:])]
    assert copies[0] == "0.0" != copies[1]
    pack = native.pack
    monkeypatch.setattr(native, "pack", lambda weight: pack(weight) * 1.5)
    code, out, err = run(generate_ragged, *argv)
    assert code == 0 and "compiled step: no, it computes something else than the model" in err
    monkeypatch.setattr(compiled, "try_out", lambda fast: None)
    code, out, _ = run(generate_ragged, *argv)
    assert code == 1 and "WRONG: request 'r0': logits of token 0 differ" in out


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
    assert err.endswith(": interrupted\n") and "Traceback" not in err


def test_a_reader_who_has_read_enough():
    """As `| head -1`: the pipe is closed when the next line comes."""
    reading, writing = os.pipe()
    with open(writing, "w") as out, contextlib.redirect_stdout(out):
        os.close(reading)
        assert flags.guarded("x", lambda: print("line", flush=True)) == 1
        print("and no error later, when Python ends", flush=True)


# --- any flags, any files -------------------------------------------------------------------------

NUMBERS = [1, 7, 60, 10**20, 0, -1, 1.5, "x", ""]
FLAGS = {   # a flag -> its values; None: without a value
    **{f"--{name}": NUMBERS for name in ("max_new_tokens", "top_k", "seed", *KNOB_NUMBERS)},
    "--policy": ["fcfs", "sjf", "priority", "x"],
    "--no_cache": [None],
    "--pack": ["batch", "dataset"],
    "--temperature": [0, 0.7, 1e-300, 1e300, "nan", "inf", -1, "hot"],
    "--top_p": [0.5, 1, 0, 1.5, "nan"],
    "--arrival_rate": [0.1, 1e9, 1e-9, 1e-300, 0, "nan", "inf"],
    "--attention": ["mask", "varlen"],
    "--dtype": ["float32", "float64", "bfloat16", "float8"],
    "--prompt": ["", "# a", "<|endoftext|>", "\0é\udc80"],
}
VALUES = st.one_of(st.text(max_size=8), st.integers(-3, 9), st.none(), st.floats())
LINE = st.dictionaries(st.sampled_from([*KEYS, "odd"]), VALUES, max_size=4)
JSON_LINES = st.lists(LINE, max_size=3)
CONTENTS = st.one_of(
    st.none(), st.binary(max_size=60), st.text(max_size=60).map(str.encode),
    JSON_LINES.map(lambda lines: "\n".join(map(json.dumps, lines)).encode()))


@settings(max_examples=examples(120))
@given(stage=st.sampled_from(STAGES), content=CONTENTS, suffix=st.sampled_from(["jsonl", "txt"]),
       given_flags=st.lists(st.sampled_from([(flag, value) for flag, values in FLAGS.items()
                                       for value in values]), max_size=5))
def test_fuzz_never_a_traceback(stage, given_flags, content, suffix, tmp_path):
    arguments = ["--max_new_tokens=3"]   # a later one counts
    arguments += [flag if value is None else f"{flag}={value}" for flag, value in given_flags]
    if content is None:
        arguments.append("--prompt=# a")
    else:
        (tmp_path / f"p.{suffix}").write_bytes(content)
        arguments.append(f"--prompts={tmp_path / f'p.{suffix}'}")
    code, out, err = run(stage, *arguments)
    assert code in (0, 2), (code, out, err)
    if code == 2:
        assert len(err.splitlines()) == 1, err


# --- progress -------------------------------------------------------------------------------------

def test_live_progress_on_a_terminal():
    """In one line, which each request that ends leaves behind."""
    model, tokenizer = load()
    requests = [Request(tokenizer.encode("# json\nLoad a file. "), 9, name=name, arrival=arrival)
                for name, arrival in [("short", 0), ("late", 6)]]
    screen = io.StringIO()
    screen.isatty = lambda: True
    with progress(model, requests, token_budget=4, stream=screen):
        generate_interleaved.generate(model, requests, token_budget=4)
    assert "\r\x1b[K0 of 2 done" in screen.getvalue() and "budget 4/4" in screen.getvalue()
    assert all(f"{request.name}: {request.finish_reason} after " in screen.getvalue()
               for request in requests)
    assert not model._forward_pre_hooks   # it leaves nothing behind
