"""Makes results files that look like those of a real run, of any size, the same for the same seed.

python tests/report/synthetic.py results.jsonl --verdicts 20000
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NASTY = """</script><script>alert(1)</script><!-- "quoted" 'single' & <b>bold</b> \u2028 ]]> \x1b[31mred\x07 %0A::e
::error::"""

# Module -> (details of its cases, inputs with their dimensions, parameters with theirs)
MODULES: dict[str, tuple[tuple[str, ...], dict[str, int], dict[str, int]]] = {
    "Linear": (("(8,12):4x8", "(7,5):3x7", "(8,12,bias=False):4x8"), {"input": 2}, {"weight": 2, "bias": 1}),
    "Bilinear": (("(3,4,5):6x3",), {"input1": 2, "input2": 2}, {"weight": 3, "bias": 1}),
    "Conv1d": (("(4,8,3):2x4x9",), {"input": 3}, {"weight": 3, "bias": 1}),
    "Conv2d": (("(4,8,3):4x4x8x8", "(4,8,3,stride=2):4x4x9x9"), {"input": 4}, {"weight": 4, "bias": 1}),
    "Conv3d": (("(2,4,3):2x2x5x5x5",), {"input": 5}, {"weight": 5, "bias": 1}),
    "ConvTranspose2d": (("(4,8,3):4x4x6x6",), {"input": 4}, {"weight": 4, "bias": 1}),
    "BatchNorm1d": (
        ("(4):8x4:train", "(4):8x4:eval", "(4,affine=False):8x4:train", "(4,momentum=None):8x4:train"),
        {"input": 2},
        {"weight": 1, "bias": 1},
    ),
    "BatchNorm2d": (("(8):4x8x2x4:train", "(8):4x8x2x4:eval"), {"input": 4}, {"weight": 1, "bias": 1}),
    "BatchNorm3d": (("(3):4x3x2x2x2:train",), {"input": 5}, {"weight": 1, "bias": 1}),
    "LayerNorm": (("(8):4x6x8", "((6,8)):4x6x8"), {"input": 3}, {"weight": 1, "bias": 1}),
    "RMSNorm": (("(8):4x6x8",), {"input": 3}, {"weight": 1}),
    "GroupNorm": (("(4,8):4x8x3",), {"input": 3}, {"weight": 1, "bias": 1}),
    "Embedding": (
        (
            "(12,8):8x4",
            "(12,8,padding_idx=2):8x4",
            "(12,8,scale_grad_by_freq):8x4",
            "(12,8,max_norm=1.0):8x4",
        ),
        {"input": 2},
        {"weight": 2},
    ),
    "MSELoss": (("(mean):8x4", "(sum):8x4", "(none):8x4", "(mean):7x3"), {"input": 2, "target": 2}, {}),
    "L1Loss": (("(mean):8x4", "(sum):8x4"), {"input": 2, "target": 2}, {}),
    "CrossEntropyLoss": (
        ("(mean):8x5", "(mean,weight):8x5", "(mean,ignore_index=1):8x5", "(sum,label_smoothing=0.1):8x5"),
        {"input": 2, "target": 1},
        {"weight": 1},
    ),
    "NLLLoss": (("(mean):8x5", "(sum):8x5"), {"input": 2, "target": 1}, {}),
    "KLDivLoss": (("(batchmean):8x4", "(mean):8x4"), {"input": 2, "target": 2}, {}),
    "GLU": (("-0",), {"input": 2}, {}),
    "Mish": (("-0",), {"input": 2}, {}),
    "GELU": (("-0", "-1"), {"input": 2}, {}),
    "ReLU": (("-0",), {"input": 2}, {}),
    "Hardswish": (("-0", "-1"), {"input": 3}, {}),
    "Softmax": (("-0",), {"input": 2}, {}),
    "AdaptiveAvgPool2d": (("-0", "-1"), {"input": 4}, {}),
    "MaxPool2d": (("-0",), {"input": 4}, {}),
    "MultiheadAttention": (
        ("(8,2):4x6x8:train",),
        {"query": 3, "key": 3, "value": 3},
        {"in_proj_weight": 2, "in_proj_bias": 1, "out_proj.weight": 2, "out_proj.bias": 1},
    ),
    "TransformerEncoderLayer": (
        ("(8,2,16):4x6x8:train", "(8,2,16):4x6x8:eval"),
        {"src": 3},
        {
            "self_attn.in_proj_weight": 2,
            "self_attn.out_proj.weight": 2,
            "linear1.weight": 2,
            "linear2.weight": 2,
            "norm1.weight": 1,
            "norm2.weight": 1,
        },
    ),
    "LSTM": (("(4,6):5x3x4",), {"input": 3}, {"weight_ih_l0": 2, "weight_hh_l0": 2, "bias_ih_l0": 1}),
    "ResNetBlock": (
        ("(8):4x8x8x8:train",),
        {"input": 4},
        {"conv1.weight": 4, "bn1.weight": 1, "bn1.bias": 1, "conv2.weight": 4, "bn2.weight": 1},
    ),
    "MLP": (
        ("(8,32,8):4x8",),
        {"input": 2},
        {"fc1.weight": 2, "fc1.bias": 1, "fc2.weight": 2, "fc2.bias": 1},
    ),
}


def _sbp(rng: random.Random, ndim: int, axes: int) -> str:
    words = []
    for _ in range(axes):
        choice = rng.randrange(ndim + 2)
        words.append("B" if choice == 0 else "P" if choice == 1 else f"S({choice - 2})")
    return words[0] if axes == 1 else f"({', '.join(words)})"


def _trials(count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    cases = [(module, detail) for module, (details, _, _) in MODULES.items() for detail in details]
    barren = 0
    while len(seen) < count:
        module, detail = cases[rng.randrange(len(cases))]
        _, inputs, parameters = MODULES[module]
        mesh = rng.choice(["4", "4", "2x2"])
        axes = mesh.count("x") + 1
        tensors = {**inputs, **parameters, "grad_output": max(inputs.values())}
        size = barren // 200  # where small combinations are used up, the case gets a number
        case = f"{module}{detail}" + (f"#{size}" if size else "")
        placements = {}
        for name, ndim in tensors.items():
            sbp = _sbp(rng, ndim, axes)
            if set(sbp) - set("B(), "):
                placements[name] = sbp
        kind = "train" if parameters and rng.random() < 0.2 else "forward"
        placed = ",".join(f"{name}={sbp}".replace(" ", "") for name, sbp in placements.items())
        name = f"modules/{case}/{mesh}/{placed or 'all=B'}"
        options = {"optimizer": rng.choice(["SGD", "AdamW"])} if kind == "train" else {}
        name += f"/train/optimizer={options['optimizer']}" if options else ""
        if name in seen:
            barren += 1
            continue
        seen.add(name)
        yield {
            "kind": "verdict",
            "id": name,
            "suite": "modules",
            "subject": "dtensor",
            "case": case,
            "placements": placements,
            "mesh": mesh,
            "dtype": "float64",
            "device": "cpu",
            "trial": kind,
            "options": options,
        }


def _finding(
    rng: random.Random, verdict: str, quantity: str, claimed: str | None, relation: str
) -> dict[str, Any]:
    ranks = [0, 1, 2, 3] if rng.random() < 0.7 else sorted(rng.sample(range(4), rng.randint(1, 3)))
    error = 10 ** rng.uniform(-4, 0.7)
    return {
        "verdict": verdict,
        "quantity": quantity,
        "rank": ranks[0],
        "ranks": ranks,
        "claimed": claimed,
        "max_abs_error": error * rng.uniform(0.1, 3),
        "relative_error": error if rng.random() < 0.97 else "nan",
        "relation": relation,
    }


def _judge(trial: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A verdict that depends on module and placements as it does in torch, with some chance in it."""
    module = trial["case"].split("(")[0].split("-")[0]
    placed = trial["placements"]
    split = next((name for name, sbp in placed.items() if "S(" in sbp and not name.startswith("grad")), None)
    word, findings = "pass", []
    first = next(iter(MODULES[module][1]))
    lie = placed.get(first, "B")
    if "Loss" in module and "mean" in trial["case"] and "S(0)" in lie:
        word = "wrong gradient"
        findings = [
            _finding(
                rng, word, f"{first}.grad", "S(0)", "4 x the reference (x the number of ranks) on every rank"
            )
        ]
        if "weight" in trial["case"] or "ignore" in trial["case"]:
            word = "wrong value"
            findings.insert(0, _finding(rng, word, "output", "P", "1.13 x the reference on every rank"))
    elif module.startswith("BatchNorm") and "S(1)" in lie and "train" in trial["case"]:
        word = "wrong state"
        findings = [
            _finding(
                rng,
                word,
                "running_mean",
                "B",
                "the part of another rank (rank 1 holds that of rank 0) on ranks 1, 2, 3",
            ),
            _finding(rng, word, "running_var", "B", "differs, by no simple rule on every rank"),
        ]
    elif module.startswith("Conv") and any(f"S({d})" in lie for d in (2, 3, 4)):
        word = "wrong layout"
        findings = [
            _finding(rng, word, "output", lie, "shape (4, 8, 1, 6) where (4, 8, 6, 6) is due on every rank")
        ]
    elif "scale_grad" in trial["case"] and "S(0)" in lie:
        word = "wrong gradient"
        findings = [_finding(rng, word, "weight.grad", "B", "differs, by no simple rule on every rank")]
    elif module in ("GLU", "Mish") and "P" in lie:
        word = "ranks disagree"
        claim = "the ranks claim different placements: rank 0 S(0), rank 1 S(1), rank 2 S(0), rank 3 S(0)"
        findings = [_finding(rng, word, "output", "S(0)", claim)]
    elif module in ("LSTM", "AdaptiveAvgPool2d") and split:
        word = "refused"
    elif rng.random() < 0.004:
        word = rng.choice(["error", "hang", "crash", "wrong value", "noise", "lost write"])
        findings = [_finding(rng, word, "output", "B", "differs, by no simple rule on every rank")]
    elif rng.random() < 0.02:
        word = "refused"
    record = {**trial, "verdict": word, "known": None, "findings": findings}
    record["largest_error"] = 10 ** rng.uniform(-17, -14.5)
    record["seconds"] = round(rng.uniform(0.01, 0.08), 6)
    if word in ("error", "refused", "hang", "crash"):
        record["findings"] = [
            {
                "verdict": word,
                "quantity": "",
                "rank": 2,
                "ranks": [2],
                "claimed": None,
                "max_abs_error": 0.0,
                "relative_error": 0.0,
                "relation": f"RuntimeError: something about {module} in {word}, on rank 2",
            }
        ]
        record["error"] = {
            "type": "RuntimeError" if word != "hang" else "hang",
            "message": f"something about {module} in {word}",
            "traceback": "Traceback (most recent call last):\n"
            '  File "torch/distributed/tensor/_dispatch.py", line 154, in dispatch\n'
            "RuntimeError: something\n",
            "stacks": {str(rank): f'File "case.py", line {rank + 10} in forward\n' for rank in range(4)},
        }
    if rng.random() < 0.3:
        names = ["output", f"{first}.grad", *(f"{name}.grad" for name in list(MODULES[module][2])[:1])]
        record["noise"] = {
            name: [10 ** rng.uniform(-17, -14.5), 10 ** rng.uniform(-16.2, -15)] for name in names
        }
        for finding in record["findings"]:
            if finding["quantity"] in record["noise"]:
                record["noise"][finding["quantity"]][0] = finding["relative_error"]
    if word != "pass":
        record["command"] = (
            f"mpirun -n 4 python -m sbp.run '{trial['case']}' --suite modules --mesh {trial['mesh']} "
            f"--level full --id '{trial['id']}'"
        )
    if word == "wrong gradient" and rng.random() < 0.5:
        record["repro"] = "repro_" + "".join(c if c.isalnum() else "_" for c in trial["id"])[:60] + ".py"
        record["origin"] = {
            "file": "torch/nn/functional.py",
            "line": 3884,
            "module": "",
            "operator": "aten.mse_loss",
        }
    if word == "hang" and rng.random() < 0.3:
        record["flaky"] = True
    return record


def make_records(
    count: int = 200, seed: int = 0, torch: str = "2.13.0+cpu", nasty: bool = False
) -> list[dict[str, Any]]:
    """All records of a run of ``count`` trials. ``nasty`` puts text in that breaks what does not escape."""
    rng = random.Random(seed)
    run = {
        "kind": "run",
        "format": 1,
        "versions": {
            "sbp": "0.1.0",
            "python": "3.11.7",
            "torch": torch,
            "numpy": "2.4.6",
            "mpi4py": "4.1.2",
            "mpich": "5.0.2",
        },
        "seed": 0,
        "world": {"size": 4, "launcher": "mpirun", "hosts": ["localhost"], "backend": "gloo"},
        "subject": "dtensor",
        "meshes": ["4", "2x2"],
        "command": "python -m sbp.run --results results.jsonl",
        "started": "2026-10-01T12:00:00Z",
    }
    verdicts = [_judge(trial, rng) for trial in _trials(count, rng)]
    for verdict in verdicts:
        if verdict["verdict"] == "wrong layout" and rng.random() < 0.8:
            verdict["known"] = "a convolution split on a spatial dimension gives a shard's shape"
    if nasty:
        verdicts[0].update(
            id=verdicts[0]["id"] + NASTY, case=verdicts[0]["case"] + NASTY, verdict="error", known=None
        )
        verdicts[0]["findings"] = [_finding(rng, "error", NASTY, NASTY, NASTY)]
        verdicts[0]["error"] = {
            "type": NASTY,
            "message": NASTY,
            "traceback": NASTY * 2,
            "stacks": {NASTY: NASTY},
        }
        verdicts[0].update(command=NASTY, repro=NASTY, placements={NASTY: NASTY}, suite=NASTY)
    inplace = [
        {
            "kind": "inplace",
            "file": "my_model.py",
            "line": 42,
            "operator": "aten::add_.Tensor",
            "module": "layers.3.mlp",
            "outcome": "changed placement",
            "source": "x += y",
            "placements": "x P -> S(0)",
            "count": 4,
        },
        {
            "kind": "inplace",
            "file": "my_model.py",
            "line": 57,
            "operator": "aten::zero_",
            "module": "layers.3",
            "outcome": "lost",
            "source": "x[:2].zero_()",
            "placements": "x S(0)",
            "count": 1,
        },
    ]
    counts = Counter(verdict["verdict"] for verdict in verdicts)
    bad = [v for v in verdicts if v["verdict"] not in ("pass", "noise", "refused")]
    summary = {
        "kind": "summary",
        "planned": len(verdicts),
        "verdicts": len(verdicts),
        "counts": dict(counts),
        "known": sum(v["known"] is not None for v in bad),
        "unexpected": sum(v["known"] is None for v in bad),
        "complete": True,
        "stopped": "",
        "seconds": round(sum(v["seconds"] for v in verdicts), 3),
    }
    return [run, *verdicts, *inplace, summary]


def write(path: str | Path, records: list[dict[str, Any]]) -> Path:
    """Write records as ``sbp.run`` does."""
    lines = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    Path(path).write_text("".join(lines), encoding="utf-8")
    return Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a made-up results file.")
    parser.add_argument("path")
    parser.add_argument("--verdicts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nasty", action="store_true")
    options = parser.parse_args()
    write(options.path, make_records(options.verdicts, options.seed, nasty=options.nasty))


if __name__ == "__main__":
    sys.exit(main())
