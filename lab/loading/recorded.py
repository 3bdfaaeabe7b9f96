"""The workloads and plans that were recorded from vLLM (lab/experiments/plans.py)."""
import gzip
import json
from pathlib import Path

RECORDED = Path(__file__).parent.parent / "experiments" / "results" / "vllm_plans.jsonl.gz"


def recorded():
    """(vLLM's version, workloads with their `plans`) as committed."""
    with gzip.open(RECORDED, "rt", encoding="utf-8") as file:
        head, *lines = map(json.loads, file)
    return head["vllm"], lines
