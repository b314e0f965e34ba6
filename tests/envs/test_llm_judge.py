"""A judge over HTTP, asked on loopback: scores, retries, time-outs, malformed replies, and what becomes of an error."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tandem.envs.llm_judge import filled
from tandem.envs.verifiers import build_verifier
from tandem.types import Prompt, RolloutFailed, Score
from tests.envs.asking import ask_all, verifier_config


class Judge(ThreadingHTTPServer):
    """Answers with the next of its replies, and with the last one from then on. A reply: (status, body), or HANG."""

    daemon_threads = True

    def __init__(self, replies):
        super().__init__(("127.0.0.1", 0), Desk)
        self.replies = list(replies)
        self.asked = []
        self.over = threading.Event()


class Desk(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        reply = self.server.replies.pop(0) if len(self.server.replies) > 1 else self.server.replies[0]
        if reply == HANG:
            self.server.over.wait()
            return
        status, text = reply
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


HANG = "hang"


def says(content):
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})


@pytest.fixture
def judge():
    """Starts a judge with these replies; gives it and the section that names it."""
    started = []

    def start(*replies, **options):
        server = Judge(replies)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        started.append((server, thread))
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        return server, verifier_config(name="llm_judge", base_url=url, model="m", retry_backoff_s=0.0, **options)

    yield start
    for server, thread in started:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("written", "options", "reward"),
    [
        ("Fine. Score: 7", {}, 0.7),
        ("score : **10**", {}, 1.0),
        ("Score: 3, no, Score: 0", {}, 0.0),
        ("Score: 2.5", {}, 0.25),
        ("Score: 3", {"min_score": 1.0, "max_score": 5.0}, 0.5),
        ("Score: -1", {"min_score": -1.0, "max_score": 1.0}, 0.0),
        ("<4>", {"score_pattern": "<(\\d)>", "max_score": 4.0}, 1.0),
    ],
)
def test_the_last_score_counts_mapped_to_0_to_1(judge, written, options, reward):
    _, config = judge(says(written), **options)
    assert ask_all(config, [("72", "x")]) == [Score(pytest.approx(reward))]


def test_the_judge_is_sent_what_the_recipe_says(judge, monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", "sk-1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    server, config = judge(
        says("Score: 1"),
        api_key_env="MY_JUDGE_KEY",
        prompt="{question}|{answer}|{response}|{other}",
        temperature=0.5,
        max_tokens=9,
    )
    ask_all(config, [("{response}", "a {question} }{")])
    content = "How many?|{response}|a {question} }{|{other}"
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0.5, "max_tokens": 9}
    assert server.asked == [("/v1/chat/completions", "Bearer sk-1", body)]


def test_a_text_of_the_model_cannot_name_another_text():
    assert filled("{a}{b}", {"a": "{b}", "b": "{a}"}) == "{b}{a}"


def test_without_a_key_none_is_sent(judge):
    server, config = judge(says("Score: 1"))
    ask_all(config, [("72", "x")])
    assert server.asked[0][1] is None


@pytest.mark.parametrize(
    "wrong",
    [
        (500, "oops"),
        (503, "busy"),
        (429, "slow down"),
        (408, ""),
        (200, "no json"),
        (200, "{}"),
        (200, '{"choices": []}'),
        (200, '{"choices": [{"message": {"content": null}}]}'),
        says("I would rather not say."),
        says("Score: 11"),
        says(""),
    ],
)
def test_what_may_go_well_the_next_time_is_tried_again_and_then_fails_the_rollout(judge, wrong):
    server, config = judge(wrong, wrong, says("Score: 10"))
    assert ask_all(config, [("72", "x")]) == [Score(1.0)]
    assert len(server.asked) == 3
    server, config = judge(wrong)
    (failure,) = ask_all(config, [("72", "x")])
    assert isinstance(failure, RolloutFailed)
    assert failure.kind == "infrastructure"
    assert "the judge m at http://127.0.0.1" in str(failure)
    assert "'row:0'" in str(failure)
    assert "(3 tries)" in str(failure)
    assert len(server.asked) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_request_that_is_refused_is_not_repeated(judge, status):
    server, config = judge((status, "no such model"))
    (failure,) = ask_all(config, [("72", "x")])
    assert isinstance(failure, RolloutFailed)
    assert failure.kind == "data"
    assert f"HTTP {status}: 'no such model'" in str(failure)
    assert len(server.asked) == 1


def test_a_judge_that_does_not_answer_in_time_is_asked_again(judge):
    _, config = judge(HANG, says("Score: 5"), request_timeout_s=1.5)
    assert ask_all(config, [("72", "x")]) == [Score(0.5)]
    _, config = judge(HANG, request_timeout_s=0.2, max_retries=1)
    (failure,) = ask_all(config, [("72", "x")])
    assert "no reply in request_timeout_s=0.2 (2 tries)" in str(failure)


def test_a_judge_that_is_not_there_fails_the_rollout():
    config = verifier_config(name="llm_judge", base_url="http://127.0.0.1:9/v1", model="m", retry_backoff_s=0.0)
    (failure,) = ask_all(config, [("72", "x")])
    assert isinstance(failure, RolloutFailed)
    assert failure.kind == "infrastructure"
    assert "ConnectError" in str(failure)


def test_an_error_may_end_the_run_instead(judge):
    _, config = judge((401, "no key"), on_error="fail")
    with pytest.raises(RuntimeError, match=r"HTTP 401: 'no key' \(env\.verifier\.on_error=fail ends the run\)"):
        ask_all(config, [("72", "x")])


def test_a_key_that_is_not_there_is_said_before_the_run(monkeypatch):
    monkeypatch.delenv("MY_JUDGE_KEY", raising=False)
    config = verifier_config(name="llm_judge", base_url="http://127.0.0.1:9/v1", model="m", api_key_env="MY_JUDGE_KEY")
    with pytest.raises(ValueError, match="api_key_env=MY_JUDGE_KEY, but there is no such environment variable"):
        build_verifier(config)


def test_no_more_requests_are_in_flight_than_allowed(judge):
    server, config = judge(HANG, request_timeout_s=30.0, max_concurrency=2)

    async def ask():
        verifier = build_verifier(config)
        asks = [asyncio.ensure_future(verifier.score(Prompt(n, str(n), "", "", ()), "x")) for n in range(6)]
        while len(server.asked) < 2:
            await asyncio.sleep(0)
        for one in asks:
            one.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        await verifier.close()

    asyncio.run(ask())
    assert len(server.asked) == 2
