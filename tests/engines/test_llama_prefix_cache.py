"""The example with the real model and short prompts; its pieces, where no model is needed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import llama_prefix_cache as example
from llama_engine import EngineError, LlamaEngine, find_model
from tests.needs import needs_fuse

StartEngine = Callable[[], LlamaEngine]


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Starts engine processes whose slot directory is a plain one, and ends them."""
    running: list[LlamaEngine] = []

    def start() -> LlamaEngine:
        slots = tmp_path / "slots"
        slots.mkdir(exist_ok=True)
        running.append(LlamaEngine(find_model(), slots, context_tokens=512, log=tmp_path / "llama.log"))
        return running[-1]

    yield start
    for engine in running:
        engine.stop()


@pytest.mark.engines
def test_a_new_engine_process_continues_from_a_saved_prefix(start_engine: StartEngine):
    first = start_engine()
    prefix, question = example.make_tokens(first, 100)
    assert len(prefix) == 100
    seen: list[tuple[int, int]] = []
    first.compute(prefix, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (100, 100)
    first.save("prefix")
    computed = first.ask(prefix + question)
    first.stop()

    second = start_engine()
    second.restore("prefix")
    assert second.ask(prefix + question).text == computed.text != ""


@pytest.mark.engines
def test_a_slot_file_that_is_gone_is_an_engine_error(start_engine: StartEngine):
    with pytest.raises(EngineError, match="restore"):
        start_engine().restore("absent")


@pytest.mark.engines
@pytest.mark.mount
@needs_fuse
def test_the_example_runs_with_a_short_prompt(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    status = example.main(["--tokens", "200", "--scratch", str(tmp_path)])
    printed = capfd.readouterr()
    assert (status, printed.err) == (0, "")
    for line in (
        "hit, new engine process",
        "hit, after a daemon restart",
        "the bytes are the same",
        "computed again",
    ):
        assert line in printed.out
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


def outcome(text: str, *, hit: bool) -> example.Outcome:
    return example.Outcome(hit, prefix_seconds=1.0, save_seconds=0.0, first_token_seconds=1.0, text=text)


def test_answers_that_differ_fail_the_run():
    rows = [("cold", outcome("Paris", hit=False)), ("warm", outcome("Rome", hit=True))]
    with pytest.raises(example.DemoError, match=r"'Paris' \(cold\), 'Rome' \(warm\)"):
        example.same_answer(rows)


def test_a_hit_that_does_not_come_fails_the_run():
    with pytest.raises(example.DemoError, match="warm: expected a hit, got a miss"):
        example.expect(outcome("Paris", hit=False), hit=True, when="warm")


def test_each_prefix_has_a_key_of_its_own():
    keys = {example.key_of(prefix) for prefix in ([1, 2], [12], [2, 1], [1, 2, 3])}
    assert len(keys) == 4
    assert all(key.startswith("smollm2-135m/v1/prefix/") for key in keys)


@pytest.mark.parametrize("text", ["", "31", "8001", "-5", "1e3", "many"])
def test_a_bad_number_of_tokens_is_a_usage_error(text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        example.main([f"--tokens={text}"])
    assert stop.value.code == 2
    assert "is not a number from 32 to 8000" in capsys.readouterr().err


def test_two_runs_in_one_scratch_directory_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with example.only_run_in(tmp_path):
        assert example.main(["--scratch", str(tmp_path)]) == 1
    assert "another run is using" in capsys.readouterr().err
