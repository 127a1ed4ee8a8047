"""The progress bar stays on stderr, and leaves nothing behind when work fails."""

import pytest

from star_elastic.progress import progress_bar


def test_finished_work_is_told_on_stderr_only(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("scoring", 4, "tokens") as advance:
        advance(1)
        advance(3)
    said = capsys.readouterr()
    assert said.out == "" and "scoring" in said.err and "100%" in said.err and "tokens/s" in said.err


def test_bytes_have_binary_units(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("slice", 2**40, "bytes") as advance:
        advance(2**39)
        advance(2**39)
    said = capsys.readouterr().err
    assert "iB/s" in said and "1.0/1.0 TiB" in said


def test_hidden_bar_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("scoring", 4, "tokens", shown=False) as advance:
        advance(4)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_work_leaves_no_bar(error: type[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(error), progress_bar("scoring", 4, "tokens") as advance:
        advance(1)
        raise error
    assert capsys.readouterr().err.strip() == ""
