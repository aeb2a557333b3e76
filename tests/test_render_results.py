"""The form in which figures are committed."""

import json

import render_results
from render_results import Figure


def test_a_results_file_has_the_one_form_and_its_last_printed_line_is_its_content(tmp_path, capsys):
    rows = [
        Figure.median("time", [3.0, 1.0, 2.0], "ms", must=2.5),
        Figure("speed", 2, "x", must=3, aim=5, better="higher"),
        Figure("note", 7, "1/s"),
    ]
    reached = render_results.write_results(
        "x", rows, command="make x", ceilings={"copy_gb_per_s": 9.5}, folder=tmp_path
    )
    assert reached is False  # the speed
    written = json.loads((tmp_path / "x.json").read_text())
    assert set(written) == {"command", "date", "device", "versions", "ceilings", "rows"}
    assert {"python", "jax"} <= set(written["versions"])
    assert written["rows"][0] == {
        "what": "time", "value": 2.0, "unit": "ms", "must": 2.5, "aim": None, "better": "lower", "repeats": [3, 1, 2],
    }  # fmt: skip
    assert (written["rows"][2]["must"], written["rows"][2]["repeats"]) == (None, [])
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == written
    assert printed[:-1] == [
        "| what | value | must | aim |",
        "|---|---|---|---|",
        "| time | 2 ms | ≤ 2.5 |  |",
        "| speed | 2 x **(missed)** | ≥ 3 | ≥ 5 |",
        "| note | 7 1/s |  |  |",
    ]


def test_results_are_reached_when_every_must_is(tmp_path):
    rows = [Figure("time", 2.5, "ms", must=2.5), Figure("speed", 3, "x", must=3, better="higher"), Figure("n", 1, "")]
    assert render_results.write_results("x", rows, folder=tmp_path) is True


def test_the_readme_shows_what_the_result_files_say():
    text = render_results.README.read_text(encoding="utf-8")
    assert render_results.START in text and render_results.render_readme(text) == text
