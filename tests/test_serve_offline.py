"""scripts/serve_offline.py with an engine that answers from a formula: options, rows, resuming, Ctrl-C, the table."""

import gzip
import json
import signal
from types import SimpleNamespace

import pytest
import rows
import serve_offline
import simulate_cache
from tokenizers import Tokenizer

from prefix_jax import RequestOutput
from prefix_jax.request import CompletionOutput


class FormulaLLM:
    """Takes what LLM takes. One token a character; the first request pays for its prompt, later ones find 3 tokens
    cached; the answer is the prompt backwards. An empty prompt is refused."""

    made = ()
    interrupt_after = None  # so many answers comes Ctrl-C,
    interrupts = 1  # so many times
    chat_template = "{{ messages }}"
    slip = None  # an id whose answer differs when the cache is off

    def __init__(self, model, **options):
        self.model, self.options = model, options
        self.tokenizer = SimpleNamespace(chat_template=self.chat_template)
        self.stats = {"warmup_seconds": 1.5, "num_pages": options["num_pages"] or 99}
        self.aborted = set()
        type(self).made += (self,)

    def generate(self, prompts, sampling_params, prefix_pos, *, on_error, on_output):
        assert on_error == "return"
        self.asked = list(zip(prompts, sampling_params, prefix_pos, strict=True))
        outputs = []
        for index, (prompt, params, _) in enumerate(self.asked):
            if index == self.interrupt_after:
                for _ in range(self.interrupts):
                    signal.raise_signal(signal.SIGINT)
            outputs.append(self.answer(index, prompt, params))
            on_output(outputs[-1])
        return outputs

    def abort(self, request_id):
        self.aborted.add(request_id)

    def answer(self, index, prompt, params):
        text = prompt["prompt"] if "prompt" in prompt else "|".join(m["content"] for m in prompt["messages"])
        cached = 3 if index and self.options["enable_prefix_caching"] else 0
        said = text[::-1][: params.max_tokens]
        if prompt["request_id"] == self.slip and not self.options["enable_prefix_caching"]:
            said = said[:-1]
        refused = None if text else "prompt 0 is empty"
        reason = "abort" if prompt["request_id"] in self.aborted else "error" if refused else "length"
        answer = CompletionOutput(0, said, list(map(ord, said)), reason)
        tokens = list(map(ord, text))
        return RequestOutput(prompt["request_id"], text, tokens, [answer], num_cached_tokens=cached, error=refused)


@pytest.fixture
def engine(monkeypatch):
    """The class of the stub; its attributes go back to what they were after each test."""
    stub = type("Stub", (FormulaLLM,), {})
    monkeypatch.setattr(serve_offline, "LLM", stub)
    monkeypatch.setattr(serve_offline, "default_model_path", lambda: "the-default-model")
    monkeypatch.setattr(serve_offline, "use_compilation_cache", lambda: None)
    return stub


@pytest.fixture
def prompts(tmp_path):
    """Writes a prompts file and gives its path as text."""

    def write(*lines, name="prompts.jsonl"):
        path = tmp_path / name
        lines = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    return write


def read_answers(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def refusal(argv, capsys):
    """What is written when options are refused with status 2."""
    with pytest.raises(SystemExit) as stop:
        serve_offline.main(argv)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_without_arguments_it_asks_the_bundled_questions_under_the_bundled_system_prompt(engine, capsys):
    assert serve_offline.main([]) == 0
    (llm,) = engine.made
    assert llm.model == "the-default-model"
    assert llm.options["enable_prefix_caching"] is True
    assert len(llm.asked) == 24
    system = {prompt["messages"][0]["content"] for prompt, _, _ in llm.asked}
    assert len(system) == 1
    assert "Harrowmere" in system.pop()
    assert {(p.temperature, p.max_tokens) for _, p, _ in llm.asked} == {(0.0, 48)}
    printed = capsys.readouterr().out
    assert "What is the capital of Portugal?" in printed
    assert "hit rate" in printed.splitlines()[-5]


def test_bundled_questions_differ_and_the_system_prompt_has_about_600_tokens(shared_data):
    packed = (shared_data / "tokenizers" / "smollm2.tokenizer.json.gz").read_bytes()
    tokenizer = Tokenizer.from_str(gzip.decompress(packed).decode())
    assert 590 <= len(tokenizer.encode((serve_offline.DATA / "system_prompt.txt").read_text()).ids) <= 620
    questions, num_unreadable = rows.read_rows(serve_offline.DATA / "questions.jsonl", pytest.fail)
    assert num_unreadable == 0
    assert len({row.content for row in questions}) == 24


def test_options_reach_the_engine_and_the_sampling_parameters(engine, prompts):
    options = "--page-size 4 --num-pages 64 --memory-fraction 0.5 --max-num-seqs 8 --max-num-batched-tokens 32 "
    options += "--max-model-len 128 --schedule-policy lpm --eviction-policy cost --host-memory-gib 0.5 "
    options += "--device cpu --dtype bfloat16 --load-format dummy --no-enable-prefix-caching --model m "
    options += "--tensor-parallel-size 2 "
    options += "--temperature 0.5 --top-p 0.9 --top-k 5 --seed 7 --prefix-pos 2"
    file = prompts("one", "", "three", name="p.txt")
    assert serve_offline.main([*options.split(), "--prompts", file, "--max-tokens", "3"]) == 0
    (llm,) = engine.made
    assert llm.model == "m"
    assert llm.options == {
        "page_size": 4, "num_pages": 64, "memory_fraction": 0.5, "max_num_seqs": 8, "max_num_batched_tokens": 32,
        "max_model_len": 128, "schedule_policy": "lpm", "eviction_policy": "cost", "host_memory_gib": 0.5,
        "device": "cpu", "dtype": "bfloat16", "load_format": "dummy", "enable_prefix_caching": False,
        "seed": 7, "tokenizer": None, "tensor_parallel_size": 2,
    }  # fmt: skip
    sampled = [(p.temperature, p.top_p, p.top_k, p.seed, p.max_tokens) for _, p, _ in llm.asked]
    assert sampled == [(0.5, 0.9, 5, 7, 3), (0.5, 0.9, 5, 9, 3)]  # line 3 draws from seed + 2
    assert [pos for _, _, pos in llm.asked] == [2, 2]


def test_a_row_overrules_the_options(engine, prompts):
    file = prompts({"prompt": "a", "max_tokens": 5, "seed": 1, "stop": ["x"], "prefix_pos": 9}, {"prompt": "b"})
    assert serve_offline.main(["--prompts", file, "--prefix-pos", "4"]) == 0
    first, second = engine.made[0].asked
    assert (first[1].max_tokens, first[1].seed, first[1].stop, first[2]) == (5, 1, ("x",), 9)
    assert (second[1].max_tokens, second[1].seed, second[1].stop, second[2]) == (48, 1, (), 4)


@pytest.mark.parametrize(
    ("options", "template", "want"),
    [
        ([], "t", {"prompt": "Hi"}),
        (["--system", "S"], "t", {"messages": [("system", "S"), ("user", "Hi")]}),
        (["--system", ""], "t", {"messages": [("user", "Hi")]}),
        (["--system", "S"], None, {"prompt": "S\n\nHi"}),
        (["--system", ""], None, {"prompt": "Hi"}),
    ],
)
def test_a_prompt_becomes_a_chat_only_under_a_system_text_and_a_template(engine, prompts, options, template, want):
    engine.chat_template = template
    assert serve_offline.main(["--prompts", prompts({"prompt": "Hi"}), *options]) == 0
    ((asked, _, _),) = engine.made[0].asked
    if "messages" in asked:
        asked["messages"] = [(message["role"], message["content"]) for message in asked["messages"]]
    assert asked == want | {"request_id": "1"}


def test_messages_get_the_system_text_unless_they_begin_with_their_own(engine, prompts, tmp_path):
    (tmp_path / "system.txt").write_text("Be brief.\n")
    user, own = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Sing."}
    file = prompts({"messages": [user]}, {"messages": [own, user]})
    assert serve_offline.main(["--prompts", file, "--system", f"@{tmp_path / 'system.txt'}"]) == 0
    assert [asked["messages"][0]["content"] for asked, _, _ in engine.made[0].asked] == ["Be brief.", "Sing."]


BAD_LINES = {
    '{"prompt": "cut of': "Unterminated string",
    '["a list"]': "want a JSON object",
    '{"id": 4}': 'exactly one of "prompt" and "messages"',
    '{"prompt": "a", "messages": []}': 'exactly one of "prompt" and "messages"',
    '{"prompt": 7}': '"prompt" must be text, got 7',
    '{"prompt": "\\ud800"}': "surrogates not allowed",
    '{"messages": []}': "at least one message",
    '{"messages": ["hello"]}': "a message must be an object",
    '{"messages": [{"role": "user"}]}': '"content" must be text, got None',
    '{"prompt": "a", "id": [1]}': '"id" must be text or an integer, got [1]',
    '{"prompt": "a", "id": ""}': '"id" must be text or an integer',
    '{"prompt": "a", "prefix_pos": "8"}': '"prefix_pos" must be an integer',
    '{"prompt": "a", "temperature": -1}': "temperature must be",
    '{"prompt": "a", "max_tokens": "many"}': "max_tokens must be",
}


def test_lines_that_cannot_be_read_are_reported_with_file_and_line_and_the_others_run(engine, prompts, capsys):
    file = prompts({"prompt": "first"}, *BAD_LINES, {"prompt": "last", "mood": "fine"})
    assert serve_offline.main(["--prompts", file]) == 0
    assert [asked["prompt"] for asked, _, _ in engine.made[0].asked] == ["first", "last"]
    captured = capsys.readouterr()
    complaints = captured.err.splitlines()
    for line, (complaint, (text, why)) in enumerate(zip(complaints[:-1], BAD_LINES.items(), strict=True), 2):
        assert complaint.startswith(f"{file}:{line}: "), text
        assert why in complaint
    assert complaints[-1] == f"{file}:{len(BAD_LINES) + 2}: field 'mood' is not used, here and below"
    assert f"{len(BAD_LINES)} lines of {file} could not be read" in captured.out


def test_files_may_have_a_byte_order_mark_windows_line_ends_and_separators_inside_text(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffone \u2028 line\r\n\r\n  two\r\n".encode() + b"\xff\n")
    complaints = []
    read, num_unreadable = rows.read_rows(path, complaints.append)
    assert [(row.id, row.content) for row in read] == [(1, "one \u2028 line"), (3, "  two")]
    assert num_unreadable == 1
    assert complaints[0].startswith(f"{path}:4: ")


def test_an_id_that_occurs_twice_is_refused_with_its_lines(engine, prompts, capsys):
    file = prompts({"prompt": "a"}, {"prompt": "b", "id": "x"}, {"prompt": "c", "id": "1"}, {"prompt": "d", "id": "x"})
    assert serve_offline.main(["--prompts", file]) == 2
    assert "'1' on lines 1, 3; 'x' on lines 2, 4" in capsys.readouterr().err
    assert not engine.made


def test_answers_are_appended_with_their_counts(engine, prompts, tmp_path):
    file = prompts({"prompt": "über", "id": "a"}, {"prompt": "second", "id": 5, "max_tokens": 2})
    assert serve_offline.main(["--prompts", file, "--output", str(tmp_path / "out.jsonl")]) == 0
    assert read_answers(tmp_path / "out.jsonl") == [
        {"id": "a", "text": "rebü", "prompt_tokens": 4, "cached_tokens": 0, "output_tokens": 4,
         "finish_reason": "length", "error": None},
        {"id": 5, "text": "dn", "prompt_tokens": 6, "cached_tokens": 3, "output_tokens": 2,
         "finish_reason": "length", "error": None},
    ]  # fmt: skip


def test_refused_requests_are_answered_with_an_error_and_only_all_of_them_fail_the_run(
    engine, prompts, tmp_path, capsys
):
    file = prompts({"prompt": "", "id": "empty"}, {"prompt": "fine"})
    assert serve_offline.main(["--prompts", file, "--output", str(tmp_path / "out.jsonl")]) == 0
    by_id = {row["id"]: row for row in read_answers(tmp_path / "out.jsonl")}
    assert (by_id["empty"]["finish_reason"], by_id["empty"]["error"]) == ("error", "prompt 0 is empty")
    assert by_id[2]["finish_reason"] == "length"
    assert "request empty was refused: prompt 0 is empty" in capsys.readouterr().err
    assert serve_offline.main(["--prompts", prompts({"prompt": ""})]) == 1


def test_resume_runs_what_is_missing_and_cuts_off_a_torn_last_line(engine, prompts, tmp_path, capsys):
    file = prompts({"prompt": "a", "id": "a"}, {"prompt": "b", "id": "b"}, {"prompt": "c", "id": "c"})
    output = tmp_path / "out.jsonl"
    output.write_text('{"id": "b", "text": "whole"}\nnoise\n{"id": "c", "te')
    assert serve_offline.main(["--prompts", file, "--output", str(output), "--resume"]) == 0
    assert [asked["request_id"] for asked, _, _ in engine.made[0].asked] == ["a", "c"]
    lines = output.read_text().splitlines()
    assert lines[:2] == ['{"id": "b", "text": "whole"}', "noise"]
    assert [json.loads(line)["id"] for line in lines[2:]] == ["a", "c"]
    captured = capsys.readouterr()
    assert f"{output}:2: not an answer" in captured.err
    assert f"{output}:3: cut short by a kill, removed" in captured.err
    assert f"{output} answers 1 of 3 requests" in captured.out


def test_resume_keeps_a_whole_last_answer_that_lost_its_newline(engine, prompts, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text('{"id": 2, "text": "whole"}')
    file = prompts("one", "two", name="p.txt")
    assert serve_offline.main(["--prompts", file, "--output", str(output), "--resume"]) == 0
    assert [row["id"] for row in read_answers(output)] == [2, 1]


def test_resume_starts_a_new_file_and_runs_nothing_when_all_is_done(engine, prompts, tmp_path):
    argv = ["--prompts", prompts("one", name="p.txt"), "--output", str(tmp_path / "out.jsonl"), "--resume"]
    assert [serve_offline.main(argv), serve_offline.main(argv)] == [0, 0]
    assert len(engine.made) == 1
    assert len(read_answers(tmp_path / "out.jsonl")) == 1


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_keeps_what_is_done_and_resume_does_the_rest(engine, prompts, tmp_path, capsys, interrupts):
    engine.interrupts = interrupts
    file, output = prompts("one", "two", "three", name="p.txt"), tmp_path / "out.jsonl"
    argv = ["--prompts", file, "--output", str(output), "--summary", str(tmp_path / "s.json")]
    engine.interrupt_after = 2
    assert serve_offline.main([*argv, "--compare"]) == 130
    assert "Interrupted; 2 of 3 requests are done" in capsys.readouterr().out
    assert json.loads((tmp_path / "s.json").read_text())["requests"] == 2
    assert len(engine.made) == 1  # nothing to compare half a run with
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.interrupt_after = None
    assert serve_offline.main([*argv, "--resume"]) == 0
    assert [row["id"] for row in read_answers(output)] == [1, 2, 3]


def test_summary_holds_the_table(engine, prompts, tmp_path):
    file = prompts({"prompt": "abcd", "max_tokens": 2}, {"prompt": "efgh"}, {"prompt": ""})
    assert serve_offline.main(["--prompts", file, "--summary", str(tmp_path / "s.json")]) == 0
    summary = json.loads((tmp_path / "s.json").read_text())
    seconds, rate = summary.pop("seconds"), summary.pop("tokens_per_second")
    assert rate == pytest.approx(6 / seconds)
    assert summary == {
        "requests": 3, "prompt_tokens": 8, "cached_tokens": 3, "computed_tokens": 5, "hit_rate": 0.375,
        "output_tokens": 6, "warmup_seconds": 1.5,
    }  # fmt: skip


def test_compare_runs_a_second_engine_with_the_cache_off(engine, prompts, tmp_path, capsys):
    file = prompts("one", "two", name="p.txt")
    argv = [
        "--prompts",
        file,
        "--compare",
        "--summary",
        str(tmp_path / "s.json"),
        "--output",
        str(tmp_path / "o.jsonl"),
    ]
    assert serve_offline.main(argv) == 0
    on, off = engine.made
    assert on.options == off.options | {"enable_prefix_caching": True, "num_pages": None}
    assert off.options["num_pages"] == 99  # as many as the first engine had
    assert on.asked == off.asked
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["identical"] is True
    assert summary["speedup"] > 0
    assert len(read_answers(tmp_path / "o.jsonl")) == 2
    assert "every answer is the same" in capsys.readouterr().out


def test_compare_names_answers_that_differ(engine, prompts, tmp_path, capsys):
    engine.slip = "2"
    file = prompts("one", "two", name="p.txt")
    assert serve_offline.main(["--prompts", file, "--compare", "--summary", str(tmp_path / "s.json")]) == 0
    assert json.loads((tmp_path / "s.json").read_text())["identical"] is False
    assert "1 of 2 answers differ (2)" in capsys.readouterr().out


def test_options_that_do_not_go_together_are_refused_before_any_model_is_loaded(engine, prompts, tmp_path, capsys):
    (tmp_path / "old.jsonl").write_text("{}\n")
    for argv, why in [
        (["--compare", "--no-enable-prefix-caching"], "leave out --no-enable-prefix-caching"),
        (["--resume"], "--resume needs --output"),
        (["--output", str(tmp_path / "old.jsonl")], "old.jsonl exists: add --resume"),
        (["--output", str(tmp_path / "none" / "x.jsonl")], "is not a folder"),
        (["--temperature", "-1"], "temperature must be"),
        (["--dtype", "float8"], "invalid choice"),
    ]:
        assert why in refusal(argv, capsys)
    for argv, why in [
        (["--prompts", str(tmp_path / "missing.txt")], "missing.txt"),
        (["--prompts", prompts(name="empty.txt")], "holds no prompt"),
        (["--system", "@nowhere.txt"], "nowhere.txt"),
    ]:
        assert serve_offline.main(argv) == 2
        assert why in capsys.readouterr().err
    assert not engine.made


def test_a_model_that_cannot_be_loaded_is_said_in_one_line(engine, monkeypatch, capsys):
    def fail(*_, **__):
        raise ValueError("no folder and no GGUF file: x")

    monkeypatch.setattr(serve_offline, "LLM", fail)
    assert serve_offline.main(["--model", "x"]) == 2
    assert capsys.readouterr().err == "serve_offline.py: error: no folder and no GGUF file: x\n"


def test_a_trace_of_the_run_can_be_replayed(engine, prompts, tmp_path):
    trace = tmp_path / "trace.jsonl"
    file = prompts({"prompt": "abcdef", "max_tokens": 2}, {"prompt": ""}, {"prompt": "abcdxy"})
    serve_offline.main(["--prompts", file, "--trace", str(trace)])
    asks = simulate_cache.read_trace(trace, 2)
    assert [(list(ask.pages), ask.num_tokens, ask.num_output_tokens) for ask in asks] == [
        ([0, 1, 2], 6, 2),
        ([0, 1, 3], 6, 6),
    ]
