"""Traces of services as loads: lab/loading/traces.py, and lab/simulate on them."""
import json

import pytest
from common import refused

from lab.loading.arrivals import traced
from lab.loading.traces import read_trace
from lab.simulate import __main__ as simulate


def run(line):
    return simulate.main(line.split())


TRACES = {   # the first lines of public traces, and our own
    "azure2023.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,12\n"
                     "2023-11-16 18:17:05.4799600,30,7",
    "azure2024.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,"
                     "48,12\n2024-05-10 00:00:01.509930+00:00,30,7",
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,"
                 "48,12,60,Conversation log\n6.5,GPT-4,30,7,37,API log\n",
    "mooncake.jsonl": '{"timestamp": 27000, "input_length": 48, "output_length": 12, "hash_ids": '
                      '[46, 47]}\n\n{"timestamp": 28500, "input_length": 30, "output_length": 7, '
                      '"hash_ids": [46]}\n',
    "ours.csv": "seconds,prompt,answer,group\n0,48,12,chat\n1.5,30,7,chat\n",
    "ours.jsonl": '{"seconds": 0, "prompt": 48, "answer": 12}\n'
                  '{"seconds": 1.5, "prompt": 30, "answer": 7}'}


@pytest.mark.parametrize("name", TRACES)
def test_traces_are_read_and_served(name, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(TRACES[name])
    rows = read_trace(path, lambda *lengths: None)
    assert [row[1:3] for row in rows] == [(48, 12), (30, 7)]
    assert [row[0] for row in rows] == pytest.approx([0, 1.5])
    long, short = (request.prompt for request in traced(rows))
    alike = "hash" in TRACES[name] or "chat" in TRACES[name]
    assert (len(long), len(short)) == (48, 30) and (long[:30] == short) == alike
    assert run(f"--trace {path} --json {tmp_path}/a.json") == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["requests"] == 2 and found["saved_tokens"] == 16 * alike
    assert run(f"--trace {path} --requests 1 --stage naive") == 0


@pytest.mark.parametrize("name, text, said", [
    ("a.csv", "", "there is no request in it"), ("a.jsonl", "\n\n", "there is no request in it"),
    ("a.csv", "seconds,prompt,answer", "there is no request in it"),
    ("a.txt", "seconds,prompt,answer\n0,1,1", "must end in .csv or .jsonl"),
    ("a.csv", "seconds,prompt\n0,1", "line 2: no answer; its column is one of answer, generated"),
    ("a.csv", "seconds,prompt,answer\n0,1", "line 2: no answer"),
    ("a.csv", "seconds,prompt,answer\n0,8,0", "line 2: .. at least 1 token, not 8 and 0"),
    ("a.csv", "seconds,prompt,answer\n0,8,2\n1,x,3", "line 3: .. not x and 3"),
    ("a.csv", "seconds,prompt,answer\nnoon,8,2", "line 2: .. noon"),
    ("a.csv", "seconds,prompt,answer\nnan,8,2", "line 2: seconds must be a finite number, not nan"),
    ("a.csv", "seconds,prompt,answer\n5,8,2\n4,8,2", "line 3: comes 1 s before the line above it"),
    ("a.csv", "seconds,prompt,answer\n0,4000,500", "line 2: .. need 4499 positions, block_size is"),
    ("a.jsonl", "[1]", "line 1: not an object"), ("a.jsonl", "{", "line 1: Expecting property"),
    ("a.csv", "a\0b,\xff\n", "--trace .. a.csv: "), (None, None, "--trace .. : No such file")])
def test_a_bad_trace_gets_one_line(name, text, said, tmp_path):
    path = tmp_path / (name or "none.csv")
    if name:
        path.write_bytes(text.encode("latin-1"))
    refused(said, run, f"--trace {path}")
