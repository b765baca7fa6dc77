"""What Ulysses refuses; that it trains as one rank does is in test_rank_cases."""

import pytest
from learner_parts import make_config, small_llama

from agentrl.errors import UsageError
from agentrl.train.learner import Learner

SHARED = {"sequence_parallel_size": 2}


def test_ranks_that_are_not_a_multiple_of_a_group_are_refused():
    with pytest.raises(UsageError, match=r"sequence_parallel_size is 2, but there are 1 ranks"):
        Learner(small_llama(), make_config(train=SHARED))


def test_a_model_that_runs_on_rows_is_refused():
    config = make_config(train=SHARED, model={"attn_implementation": "eager"})
    with pytest.raises(UsageError, match=r"sequence_parallel_size shares out tries"):
        Learner(small_llama(), config)
    with pytest.raises(ValueError, match=r"sequence_parallel_size shares out tries"):
        make_config(train=SHARED | {"prefix_sharing": "padded"})
