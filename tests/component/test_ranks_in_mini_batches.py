"""Two ranks with several optimizer steps in a train step, as threads of one process, equal one
rank.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from relax_events.config.topology import Topology
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from tests.thread_ranks import make_ranks
from tests.unit.training.test_mini_batches import (
    SAMPLES,
    THREE_BY_TWO,
    assert_equal,
    backend,
    config_of,
    train,
)


@pytest.mark.parametrize("num_first", [0, 2, 6])
@pytest.mark.parametrize("max_kl", [0.0, 0.05])
def test_two_ranks_train_like_one_for_any_split_of_prompt_groups(num_first, max_kl):
    algorithm = {
        "name": "reinforce_plus_plus_baseline",
        "old_logprobs": "trainer",
        "m2_threshold": 0.2,
    }
    trainer = THREE_BY_TWO | {"max_kl": max_kl}
    both = [
        TorchBackend(config_of(algorithm, trainer), ranks=one, dtype=torch.float64)
        for one in make_ranks(Topology.of(2))
    ]
    alone = backend(algorithm, trainer)
    shares = SAMPLES[:num_first], SAMPLES[num_first:]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            mine = list(
                pool.map(
                    lambda one, share: train(one, [share] if share else []).to_metrics(),
                    both,
                    shares,
                )
            )
            expected = train(alone).to_metrics()
            assert mine[0] == mine[1] == pytest.approx(expected, rel=1e-5, abs=1e-7)
            assert expected["is_stopped_by_kl"] == (max_kl > 0)
    first, second = map(collect_weights, both)
    assert second == {}
    torch.testing.assert_close(first, collect_weights(alone), rtol=0, atol=1e-6)
    assert_equal(*both)
