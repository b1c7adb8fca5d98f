#!/usr/bin/env python3
"""Takes the picture of the matrix for the README, in a headless Chromium.

sbp report results.jsonl --html page.html --exit-zero
python docs/make_picture.py page.html docs/matrix.png --only .matrix-scroll --size 1240x1100
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

BROWSER = Path(__file__).parents[1] / "tests/report/browser.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument(
        "--fragment", default="", help="what the address of the view has after the page, with the #"
    )
    parser.add_argument("--size", default="1240x760", help="in CSS pixels")
    parser.add_argument("--scale", type=float, default=1.5)
    parser.add_argument("--only", metavar="SELECTOR", help="crop to an element: --only .matrix-scroll")
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    spec = importlib.util.spec_from_file_location("browser", BROWSER)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program = module.find_chromium()
    if program is None:
        print("make_picture: no Chromium here: apt-get install chromium", file=sys.stderr)
        return 2
    width, height = map(int, options.size.split("x"))
    browser = module.Browser(program)
    try:
        browser.size(width, height, "dark" if options.dark else "light", options.scale)
        browser.open(options.page, options.fragment)
        browser.screenshot(options.picture, options.only)
    finally:
        browser.close()
    print(f"{options.picture}: {options.picture.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
