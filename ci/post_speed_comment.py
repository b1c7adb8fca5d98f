#!/usr/bin/env python3
"""Posts what ``sbp speed`` printed as a comment on a pull request; a later run replaces the comment of the one before.

    sbp speed | tee speed.txt; python ci/post_speed_comment.py speed.txt

On GitHub Actions the repository and the pull request are known; GITHUB_TOKEN must be allowed to write to pull requests.
Needs only the standard library. Exit code: 0 posted; 2 bad usage or input; 3 GitHub did not take it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MARK = "<!-- sbp speed -->"
LONGEST = 60_000  # GitHub takes 65,536 characters


class CommentError(RuntimeError):
    """GitHub did not take the comment; one line that says why."""


def body_of(text: str, title: str) -> str:
    """The comment: the lines as they were printed, in a block that nothing in them can end."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip()
    if len(text) > LONGEST:
        text = text[:LONGEST].rpartition("\n")[0] + "\n... cut here"
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    ratios = re.findall(r"^\s*relative speed: .*$", text, re.MULTILINE)
    lead = f"{len(ratios)} comparisons; all lines:\n\n" if ratios else ""
    return f"{MARK}\n### {title}\n\n{lead}{fence}text\n{text}\n{fence}\n"


class GitHub:
    """The few calls of GitHub's API that are needed."""

    def __init__(self, url: str, repository: str, token: str) -> None:
        self.url = f"{url.rstrip('/')}/repos/{repository}"
        self.token = token

    def call(self, method: str, path: str, data: dict[str, str] | None = None) -> Any:
        """One call, and the answer. Raises CommentError."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if data is None else json.dumps(data).encode(),
            headers={
                "Accept": "application/vnd.github+json",
                "Authorization": f"Bearer {self.token}",
                "X-GitHub-Api-Version": "2022-11-28",
                "Content-Type": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            hint = "; the token may not write to pull requests" if error.code in (401, 403) else ""
            raise CommentError(f"GitHub answered {error.code} {error.reason}{hint}") from error
        except (OSError, ValueError) as error:
            raise CommentError(f"cannot talk to GitHub: {error}") from error

    def earlier_comment(self, number: int) -> int | None:
        """The comment of an earlier run on this pull request."""
        for page in range(1, 100):
            comments = self.call("GET", f"/issues/{number}/comments?per_page=100&page={page}")
            for comment in comments:
                if str(comment.get("body", "")).startswith(MARK):
                    return int(comment["id"])
            if len(comments) < 100:
                break
        return None

    def post(self, number: int, body: str) -> str:
        """Write the comment, or replace the earlier one; returns its address."""
        earlier = self.earlier_comment(number)
        if earlier is None:
            answer = self.call("POST", f"/issues/{number}/comments", {"body": body})
        else:
            answer = self.call("PATCH", f"/issues/comments/{earlier}", {"body": body})
        return str(answer.get("html_url", "posted"))


def pull_request_of_event(path: str | None) -> int | None:
    """The pull request that the workflow runs for, from the event's file."""
    if not path:
        return None
    try:
        event = json.loads(Path(path).read_text(encoding="utf-8"))
        return int(event["pull_request"]["number"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("file", help="what sbp speed printed (- for stdin)")
    parser.add_argument("--repository", default=os.environ.get("GITHUB_REPOSITORY"), help="owner/name")
    parser.add_argument("--pull-request", type=int, metavar="N", help="default: that of the workflow's event")
    parser.add_argument("--title", default="Speed")
    parser.add_argument("--dry-run", action="store_true", help="print the comment and post nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    try:
        text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return complain(f"cannot read {options.file}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}")
    if not text.strip():
        return complain(f"{options.file} is empty; did sbp speed fail?")
    body = body_of(text, options.title)
    if options.dry_run:
        print(body, end="")
        return 0
    number = options.pull_request or pull_request_of_event(os.environ.get("GITHUB_EVENT_PATH"))
    token = os.environ.get("GITHUB_TOKEN") or os.environ.get("GH_TOKEN")
    if not options.repository or not re.fullmatch(r"[\w.-]+/[\w.-]+", options.repository):
        return complain("say which repository: --repository owner/name")
    if not number:
        return complain("say which pull request: --pull-request N (the workflow was not started by one)")
    if not token:
        return complain("GITHUB_TOKEN is not set; on Actions: env: GITHUB_TOKEN: ${{ github.token }}")
    github = GitHub(os.environ.get("GITHUB_API_URL", "https://api.github.com"), options.repository, token)
    try:
        print(github.post(number, body))
    except CommentError as error:
        print(f"post_speed_comment: {error}", file=sys.stderr)
        return 3
    return 0


def complain(line: str) -> int:
    print(f"post_speed_comment: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
