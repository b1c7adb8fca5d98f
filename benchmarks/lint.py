"""How right, how complete and how fast the lint is.

    python benchmarks/lint.py                             # precision and speed; fetches the labelled packages from PyPI
    python benchmarks/lint.py --sources DIR               # look for the packages there first, and keep them there
    python benchmarks/lint.py --recall                    # recall instead; needs transformers beside torch

Precision: findings at the labelled lines of ``lint_labels.tsv``: torch as installed and packages from PyPI in the
versions that were labelled. The label of a line says what it does, as read from the code:

* ``distributed``: it writes in place to a distributed tensor or its local piece (where the program runs distributed at
  all), so that ``certain`` and ``likely`` are right;
* ``tensor``: it writes in place to a torch tensor in a module's forward or what that calls, so that ``likely`` is right
  and ``certain`` is wrong;
* ``no``: it writes to no tensor; any finding is wrong.

The sample was drawn at random from all findings of the level ``likely``, and holds all of ``certain``; what the lint no
longer finds counts neither way. Recall: small transformers run with all parameters distributed, under the watch; of the
lines in their files that really wrote to a distributed tensor, how many the lint names.
Speed: one process each over the installed torch, with flake8 beside it.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sbp.inplace.lint.config import Configuration
from sbp.inplace.lint.files import discover, lint_file

LABELS = Path(__file__).parent / "lint_labels.tsv"
RIGHT = {"certain": {"distributed"}, "likely": {"distributed", "tensor"}}
NAMES = (
    "albert bart bert blenderbot bloom codegen ctrl deberta deepseek_v2 deepseek_v3 distilbert electra ernie falcon "
    "flaubert fnet funnel gemma gemma2 git glm4_moe gpt2 gpt_neo gpt_neox gptj jamba llama longformer longt5 mamba "
    "mixtral mobilebert mpt mvp nystromformer olmo openai-gpt opt pegasus phimoe prophetnet qwen2 qwen2_moe reformer "
    "rembert roberta roformer rwkv squeezebert switch_transformers t5 xglm xlm xlnet xmod yoso"
)
# Whatever of these a configuration has is made small.
SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def labelled() -> dict[str, dict[str, dict[int, str]]]:
    """Package and version -> file -> line -> label."""
    found: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    with LABELS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            found[row["package"]][row["file"]][int(row["line"])] = row["label"]
    return found


def root_of(package: str, sources: Path) -> Path | None:
    """The folder in which the package's files lie: as installed, or fetched. None where it cannot be had."""
    name, _, version = package.partition("==")
    try:
        if importlib.metadata.version(name).split("+")[0] == version:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None:
                return Path(spec.origin).parent.parent
    except importlib.metadata.PackageNotFoundError:
        pass
    unpacked = sources / package
    if not unpacked.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", package]
        if subprocess.run([*command, "-d", str(sources)]).returncode != 0:
            return None
        wheels = sorted(sources.glob(f"{name}-{version}*.whl"))
        if not wheels:
            return None
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(unpacked, [one for one in wheel.namelist() if one.endswith(".py")])
    return unpacked


def precision(sources: Path) -> dict[str, Any]:
    """How many of the findings at labelled lines are right, by level."""
    right: dict[str, int] = defaultdict(int)
    found: dict[str, int] = defaultdict(int)
    wrong: list[str] = []
    missing: list[str] = []
    gone = 0
    for package, files in sorted(labelled().items()):
        root = root_of(package, sources)
        if root is None:
            missing.append(package)
            continue
        for file, lines in sorted(files.items()):
            left = set(lines)
            for finding in lint_file(str(root / file), Configuration()).findings:
                label = lines.get(finding.line)
                if label is None:
                    continue
                left.discard(finding.line)
                found[finding.level] += 1
                if label in RIGHT[finding.level]:
                    right[finding.level] += 1
                else:
                    wrong.append(f"{package} {file}:{finding.line} {finding.code} {finding.level}")
            gone += len(left)
    total, good = sum(found.values()), sum(right.values())
    return {
        "certain": f"{right['certain']} of {found['certain']} right ({share(right['certain'], found['certain'])})",
        "certain and likely": f"{good} of {total} right ({share(good, total)})",
        "labelled lines without a finding": gone,
        "packages that could not be had": missing,
        "wrong": wrong,
    }


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"


def recall() -> dict[str, Any]:
    """How many of the lines that wrote to distributed tensors the lint names."""
    written = lines_written()
    named = {
        file: {line for one in lint_file(file, Configuration()).findings for line in one.lines}
        for file in written
    }
    total = sum(map(len, written.values()))
    hit = sum(len(lines & named[file]) for file, lines in written.items())
    missed = [
        f"{file}:{line}" for file, lines in sorted(written.items()) for line in sorted(lines - named[file])
    ]
    return {"files": len(written), "lines": f"{hit} of {total} named ({share(hit, total)})", "missed": missed}


def lines_written() -> dict[str, set[int]]:
    """File of the models -> lines that wrote to a distributed tensor, from one forward of each model."""
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.tensor import distribute_module, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.experimental import implicit_replication

    from sbp.inplace import watch

    folder = str(Path(transformers.__file__).parent / "models")
    written: dict[str, set[int]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as rendezvous:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}/store", rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        for name in NAMES.split():
            torch.manual_seed(0)
            try:
                config = transformers.AutoConfig.for_model(name)
                for key, value in SMALL.items():
                    if hasattr(config, key):
                        setattr(config, key, value)
                model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
                model = distribute_module(model, mesh)
            except Exception as error:
                print(f"  {name}: not built: {type(error).__name__}", file=sys.stderr)
                continue
            words = distribute_tensor(torch.randint(3, 100, (2, 16)), mesh)
            inputs = {"input_ids": words}
            if config.is_encoder_decoder:
                inputs["decoder_input_ids"] = words
            seen = watch(model, compare=False)
            try:
                with implicit_replication(), seen:
                    model(**inputs)
            except Exception as error:
                print(f"  {name}: left in its middle: {type(error).__name__}", file=sys.stderr)
            for record in seen.records:
                if record.file.startswith(folder) and not record.family and record.function != "__init__":
                    written[record.file].add(record.line)
        dist.destroy_process_group()
    return dict(written)


def speed() -> dict[str, Any]:
    """Seconds over the installed torch, one process each, and the lines in it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    tree = str(Path(spec.origin).parent / "distributed")
    lines = sum(Path(path).read_bytes().count(b"\n") for path in discover([tree], Configuration()))
    ours = timed([sys.executable, "-m", "sbp", "lint", "-j", "1", tree])
    theirs = timed([sys.executable, "-m", "flake8", "--isolated", "-j", "1", tree])
    return {
        "lines": lines,
        "sbp lint, seconds": round(ours, 2),
        "sbp lint, lines a second": round(lines / ours),
        "flake8, seconds": round(theirs, 2),
        "flake8 / sbp lint": round(theirs / ours, 2),
    }


def timed(command: Sequence[str]) -> float:
    begin = time.perf_counter()
    ran = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ran.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command[:4])} failed: {ran.stderr.strip()[-300:]}")
    return time.perf_counter() - begin


def show(title: str, values: dict[str, Any]) -> None:
    print(title)
    for name, value in values.items():
        if isinstance(value, list):
            show_list(name, value)
        else:
            print(f"  {name}: {value}")


def show_list(name: str, values: Iterable[str]) -> None:
    for value in values:
        print(f"  {name}: {value}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=Path, help="where packages are kept; default: a temporary folder")
    parser.add_argument(
        "--recall", action="store_true", help="measure recall instead: run models under the watch"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.recall:
        measured = {"recall": recall()}
    else:
        with tempfile.TemporaryDirectory() as folder:
            sources = options.sources or Path(folder)
            sources.mkdir(parents=True, exist_ok=True)
            measured = {"precision": precision(sources), "speed": speed()}
    if options.json:
        print(json.dumps(measured))
        return 0
    for title, values in measured.items():
        show(title, values)
    return 0


if __name__ == "__main__":
    sys.exit(main())
