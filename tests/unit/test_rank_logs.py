"""``--rank-logs``: the folder, and what the workers write into their files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch import Settings
from sbp.rank_logs import VARIABLE, say_trial, with_rank_logs
from sbp.usage import UsageError


def test_the_folder_is_made_and_the_rest_of_the_settings_stays(tmp_path: Path) -> None:
    settings = Settings(entry="a:b", environment={"SBP_SUBJECT": "c:d"})
    found = with_rank_logs(settings, str(tmp_path / "new" / "logs"))
    assert found.output_directory == str(tmp_path / "new" / "logs") and os.path.isdir(found.output_directory)
    assert found.entry == "a:b" and found.environment == {"SBP_SUBJECT": "c:d", VARIABLE: "yes"}


def test_what_is_no_folder_to_write_to_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "rank0.log").mkdir(parents=True)
    for wrong in ("file", "file/logs", "taken", "nul\0", "long" * 100):
        with pytest.raises(UsageError) as raised:
            with_rank_logs(Settings(entry="a:b"), str(tmp_path / wrong))
        assert "--rank-logs" in str(raised.value) and "\n" not in str(raised.value)


def test_a_heading_only_where_there_is_a_file_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    say_trial(1, "suite/case/4/input=P")
    assert capsys.readouterr().out == ""
    monkeypatch.setenv(VARIABLE, "yes")
    say_trial(1, "suite/case/4/input=P\x1b")
    assert capsys.readouterr().out == "[rank 1] suite/case/4/input=P\\x1b\n"
