"""The true signatures of well-understood operators, from first principles, one readable line each.

Each line names an operator and all of its signatures but those that follow: with the output B, the outputs P(avg),
P(max) and P(min) are true as well. Conditions stand in brackets.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from sbp.oracle.calls import Call
from sbp.oracle.signatures import find_signatures

RANDOM = np.random.default_rng(5)
# Sizes that two ranks can share evenly, and sizes that they cannot.
SIZES = {"a": (6, 5), "b": (12, 9), "c": (4, 7), "1": (1, 1)}


def draw(words: str, which: int) -> torch.Tensor:
    shape = [SIZES[letter][which] for letter in words]
    return (
        torch.from_numpy(RANDOM.standard_normal(shape)) if shape else torch.tensor(1.7, dtype=torch.float64)
    )


AFFINE = "B,P(avg)->P(avg); B,P(max)->P(max); B,P(min)->P(min); P(avg),B->P(avg); P(max),B->P(max); P(min),B->P(min)"
LINEAR = "P->P; P(avg)->P(avg)"
RISING = "P(max)->P(max); P(min)->P(min)"
EACH = "S(0)->S(0); S(1)->S(1)"
BILINEAR = "P,B->P; B,P->P; P(avg),B->P(avg); B,P(avg)->P(avg)"

# name: (function, inputs by letters, signatures)
OPERATORS = {
    "neg": (torch.neg, "ab", f"B->B; {EACH}; {LINEAR}; P(max)->P(min); P(min)->P(max)"),
    "relu": (torch.relu, "ab", f"B->B; {EACH}; {RISING}"),
    "exp": (torch.exp, "ab", f"B->B; {EACH}; {RISING}; P->P(product)"),
    "sin": (torch.sin, "ab", f"B->B; {EACH}"),
    "abs": (torch.abs, "ab", f"B->B; {EACH}"),
    "floor": (torch.floor, "ab", f"B->B; {EACH}; {RISING}"),
    "round to 3 decimals": (lambda x: torch.round(x, decimals=3), "ab", f"B->B; {EACH}; {RISING}"),
    "add": (
        torch.add,
        "ab ab",
        f"B,B->B; S(0),S(0)->S(0); S(1),S(1)->S(1); P,P->P; P(avg),P(avg)->P(avg); {AFFINE}",
    ),
    "add a row": (
        torch.add,
        "ab b",
        f"B,B->B; S(0),B->S(0); S(1),S(0)->S(1); P,P->P; P(avg),P(avg)->P(avg); {AFFINE}",
    ),
    "mul": (torch.mul, "ab ab", f"B,B->B; S(0),S(0)->S(0); S(1),S(1)->S(1); {BILINEAR}"),
    "maximum": (
        torch.maximum,
        "ab ab",
        "B,B->B; S(0),S(0)->S(0); S(1),S(1)->S(1); P(max),P(max)->P(max); P(max),B->P(max); B,P(max)->P(max); "
        "P(min),B->P(min); B,P(min)->P(min)",
    ),
    "softmax": (lambda x: torch.softmax(x, 1), "ab", "B->B; S(0)->S(0)"),
    "cumsum": (lambda x: torch.cumsum(x, 1), "ab", f"B->B; S(0)->S(0); {LINEAR}"),
    "sum": (torch.sum, "ab", f"B->B; S(0)->P; S(1)->P; {LINEAR}"),
    "sum of rows": (lambda x: torch.sum(x, 1), "ab", f"B->B; S(0)->S(0); S(1)->P; {LINEAR}"),
    "mean of rows": (lambda x: torch.mean(x, 1), "ab", f"B->B; S(0)->S(0); S(1)->P(avg) (even); {LINEAR}"),
    "amax": (lambda x: torch.amax(x, 1), "ab", "B->B; S(0)->S(0); S(1)->P(max) (nonempty); P(max)->P(max)"),
    "prod": (torch.prod, "ab", "B->B; S(0)->P(product); S(1)->P(product)"),
    "norm": (torch.linalg.vector_norm, "ab", "B->B; S(0)->P(norm2.0); S(1)->P(norm2.0)"),
    "var": (torch.var, "ab", "B->B"),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), "ab", "B->B; S(0)->S(0)"),
    "argmax": (lambda x: torch.argmax(x, 1), "ab", "B->B; S(0)->S(0)"),
    "matmul": (torch.matmul, "ab bc", f"B,B->B; S(0),B->S(0); B,S(1)->S(1); S(1),S(0)->P; {BILINEAR}"),
    "bmm": (
        torch.bmm,
        "cab cba",
        f"B,B->B; S(0),S(0)->S(0); S(1),B->S(1); B,S(2)->S(2); S(2),S(1)->P; {BILINEAR}",
    ),
    "linear": (
        functional.linear,
        "ab cb c",
        "B,B,B->B; S(0),B,B->S(0); B,S(0),S(0)->S(1); B,B,P(avg)->P(avg); B,B,P(max)->P(max); B,B,P(min)->P(min); "
        "P,B,P->P; B,P,P->P; S(1),S(1),P->P; P(avg),B,B->P(avg); P(avg),B,P(avg)->P(avg); B,P(avg),B->P(avg); "
        "B,P(avg),P(avg)->P(avg)",
    ),
    "transpose": (torch.t, "ab", f"B->B; S(0)->S(1); S(1)->S(0); {LINEAR}; {RISING}"),
    "flip": (lambda x: torch.flip(x, [1]), "ab", f"B->B; S(0)->S(0); {LINEAR}; {RISING}"),
    "unsqueeze": (lambda x: x.unsqueeze(0), "ab", f"B->B; S(0)->S(1); S(1)->S(2); {LINEAR}; {RISING}"),
    "select": (lambda x: x.select(0, 2), "ab", f"B->B; S(1)->S(0); {LINEAR}; {RISING}"),
    "cat": (
        lambda x, y: torch.cat([x, y], 1),
        "ab ac",
        "B,B->B; S(0),S(0)->S(0); P,P->P; P(avg),P(avg)->P(avg); P(avg),B->P(avg); B,P(avg)->P(avg); "
        "P(max),P(max)->P(max); P(max),B->P(max); B,P(max)->P(max); "
        "P(min),P(min)->P(min); P(min),B->P(min); B,P(min)->P(min)",
    ),
    "tril": (torch.tril, "ab", f"B->B; {LINEAR}; {RISING}"),
    "diagonal": (torch.diagonal, "aa", f"B->B; {LINEAR}; {RISING}"),
    "zeros_like": (
        torch.zeros_like,
        "ab",
        f"B->B; B->P; B->P(product); B->P(norm2.0); {EACH}; "
        + "; ".join(
            f"{p}->{q}"
            for p in ("P", "P(avg)", "P(max)", "P(min)")
            for q in ("B", "P", "P(product)", "P(norm2.0)")
        ),
    ),
    "outer": (torch.outer, "a b", f"B,B->B; S(0),B->S(0); B,S(0)->S(1); {BILINEAR}"),
    "isnan": (
        torch.isnan,
        "ab",
        f"B->B; {EACH}; "
        + "; ".join(f"{p}->P(max); {p}->B (finite)" for p in ("P", "P(avg)", "P(max)", "P(min)")),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_signatures(name: str) -> None:
    function, letters, expected = OPERATORS[name]
    variants = [
        Call(name, function, tuple(draw(words, which) for words in letters.split(" ")))
        for which in (0, 1, 0, 1)
    ]
    found = find_signatures(variants)
    broadcast = {(s.inputs, s.output, s.needs) for s in found.signatures if s.placement == "B"}
    lines = {
        f"{','.join(s.inputs)}->{s.placement}" + (f" ({', '.join(s.needs)})" if s.needs else "")
        for s in found.signatures
        if not (s.placement in ("P(avg)", "P(max)", "P(min)") and (s.inputs, s.output, s.needs) in broadcast)
    }
    assert lines == {line.strip() for line in expected.split(";")}
