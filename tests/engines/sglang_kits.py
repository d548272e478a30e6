"""SGLang's own client and test kits against a server. Run by an interpreter that has SGLang:

    sglang_kits.py URL        prints what ran, and ends with the number of tests that failed

The kits' tests that only a model can pass that knows the world, or writes words, are left out.
"""

from __future__ import annotations

import os
import sys
import unittest

import sglang as sgl
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin

URL = sys.argv.pop()
KITS = (
    AbortAllMixin,
    BasicAPIContractMixin,
    BasicDecodeCorrectnessMixin,
    MatchedStopMixin,
    PauseResumeInPlaceMixin,
)
NEED_KNOWLEDGE = {
    "test_ascii_ratio",
    "test_basic_math",
    "test_capital_france",
    "test_color_completion",
    "test_finish_stop_eos",
    "test_finish_stop_regex_str",
    "test_finish_stop_str",
    "test_max_token_one",
    "test_no_repetition_blowup",
}


class Alive:
    """Replaces the server's process, which the kits poll."""

    def poll(self) -> None:
        """Report it as running: another test sends it requests."""


class Kits(*KITS, unittest.TestCase):
    """All of them."""

    base_url = URL
    model = served_model_name = "tiny"
    process = Alive()
    abort_all_num_requests, abort_all_max_new_tokens, abort_all_sleep = 24, 3000, 1
    pause_num_requests, pause_max_new_tokens, pause_duration, pause_ignore_eos = 24, 1500, 1, True


class Client(unittest.TestCase):
    """SGLang's frontend language over its HTTP client."""

    def setUp(self) -> None:
        self.endpoint = RuntimeEndpoint(URL)
        sgl.set_default_backend(self.endpoint)

    def test_sglang_frontend_generates_selects_batches_and_streams(self) -> None:
        @sgl.function
        def say(s: object, word: str) -> None:
            s += (
                f"{word}:"
                + sgl.gen("first", max_tokens=6, temperature=0)
                + ","
                + sgl.gen("second", max_tokens=4, ignore_eos=True)
            )

        @sgl.function
        def choose(s: object) -> None:
            s += "12=" + sgl.select("answer", choices=["21", "a long one", "x"])

        single = say.run(word="12")
        assert len(single.get_meta_info("second")["weight_versions"]) == 1
        several = say.run_batch([{"word": "12"}, {"word": "34"}, {"word": "12"}], num_threads=3)
        assert [one["first"] for one in several][::2] == [single["first"]] * 2
        assert choose.run()["answer"] in ("21", "a long one", "x")
        streamed = say.run(word="12", stream=True)
        pieces = list(streamed.text_iter("first"))
        assert "".join(pieces) == single["first"]

    def test_select_returns_the_most_probable_choice(self) -> None:
        @sgl.function
        def choose(s: object) -> None:
            s += "12=" + sgl.select("answer", choices=["21", "zz"])

        chosen = choose.run()
        means = chosen.get_meta_info("answer")["normalized_prompt_logprobs"]
        assert chosen["answer"] == ["21", "zz"][means.index(max(means))]

    def test_flush_and_server_info(self) -> None:
        self.endpoint.flush_cache()
        assert self.endpoint.get_server_info()["version"] == "0.5.23"


if __name__ == "__main__":
    os.environ.setdefault("NO_PROXY", "*")
    for name in NEED_KNOWLEDGE:
        setattr(Kits, name, None)
    result = unittest.TextTestRunner(verbosity=2).run(
        unittest.defaultTestLoader.loadTestsFromModule(sys.modules[__name__])
    )
    sys.exit(len(result.failures) + len(result.errors))
