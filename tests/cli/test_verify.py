"""What `fedaudit verify` prints of what it found."""

from __future__ import annotations

from fedaudit.cli.verify import _print
from fedaudit.verify.finding import Checked, Findings


def test_a_reason_of_several_figures_is_said_once(capsys):
    found = Findings()
    for figure, reason in (("data", "no code"), ("sums", "another"), ("code", "no code"), ("data", "no code")):
        found.word(figure, reason)
    one = Checked(folder="a", findings=found.list[:3])
    _print([one], False)
    assert capsys.readouterr().out.splitlines() == [
        "a: 0 figures recomputed, 0 contradicted, 3 the author's word", "The author's word:", "  data, code: no code",
        "  sums: another", "Nothing is contradicted.",
    ]  # fmt: skip
    _print([one, Checked(folder="b", findings=found.list[3:])], False)
    assert capsys.readouterr().out.splitlines()[3:6] == [
        "  data: no code (2 runs)",
        "  code: no code",
        "  sums: another",
    ]
