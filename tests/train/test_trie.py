import numpy as np
from hypothesis import given, settings
from trie_parts import batches, sample

from agentrl.train.batch import Sample
from agentrl.train.trie import TokenTrie, prefix_order


def test_each_distinct_prefix_is_a_node_and_descendants_follow_it():
    """Inputs 1 2 3, 1 2 4 and 1 5: the prompt 1 once, its child 2 once."""
    trie = TokenTrie.build([sample([1, 2, 3, 9]), sample([1, 5, 9]), sample([1, 2, 4, 9])])
    assert trie.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert trie.positions.tolist() == [0, 1, 2, 2, 1]
    assert trie.subtree_end.tolist() == [5, 4, 3, 4, 5]


def test_a_sampled_token_is_read_at_the_node_before_it_in_the_order_of_the_samples():
    trie = TokenTrie.build([sample([1, 2, 4, 9], 2), sample([1, 2, 3, 8], 2)])
    assert trie.token_ids.tolist() == [1, 2, 3, 4]
    assert trie.index.tolist() == [1, 3, 1, 2]
    assert trie.targets.tolist() == [4, 9, 3, 8]


def test_repeated_responses_share_every_node_and_every_question():
    trie = TokenTrie.build([sample([1, 2, 3], 2), sample([1, 2, 3], 2), sample([1, 2, 4], 2)])
    assert trie.num_nodes == 2
    index, targets, _, expand = trie.questions()
    assert list(zip(index, targets, strict=True)) == [(0, 2), (1, 3), (1, 4)]
    assert expand.tolist() == [0, 1, 0, 1, 0, 2]


def test_the_same_token_at_another_temperature_is_another_question():
    cold, hot = (sample([1, 2, 3], 2).with_fields(temperatures=[1, t]) for t in (0.5, 1))
    asked = TokenTrie.build([cold, hot, cold]).questions()
    assert asked.nodes.tolist() == [0, 1, 1]
    assert asked.temperatures.tolist() == [1, 0.5, 1]
    assert asked.expand.tolist() == [0, 1, 0, 2, 0, 1]


def test_a_sequence_that_ends_inside_anothers_prefix_adds_no_node():
    trie = TokenTrie.build([sample([5, 6, 7, 8]), sample([5, 6])])
    assert trie.token_ids.tolist() == [5, 6, 7]
    assert trie.index.tolist() == [2, 0]


def test_what_only_the_last_token_tells_apart_is_one_path():
    """The last token is a target only."""
    assert TokenTrie.build([sample([1, 2]), sample([1, 3])]).num_nodes == 1


def test_no_samples_are_no_nodes():
    trie = TokenTrie.build([])
    assert trie.num_nodes == len(trie.index) == 0
    assert len(trie.questions().nodes) == len(trie.questions().expand) == 0


def test_padding_of_a_tree_sees_itself_alone():
    trie = TokenTrie.build([sample([4, 5, 6]), sample([4, 7, 6])]).padded(5)
    assert trie.token_ids.tolist() == [4, 5, 7, 0, 0]
    assert trie.subtree_end.tolist() == [3, 2, 3, 4, 5]


def test_padding_prolongs_a_path():
    trie = TokenTrie.build([sample([4, 5, 6])]).padded(4)
    assert trie.token_ids.tolist() == [4, 5, 0, 0]
    assert trie.subtree_end.tolist() == [4, 4, 4, 4]


@settings(deadline=None)
@given(batches())
def test_the_ancestors_of_a_node_spell_its_prefix(samples: list[Sample]):
    trie = TokenTrie.build(samples)
    prefixes = set()
    k = np.arange(trie.num_nodes)
    for q in k:
        ancestors = np.flatnonzero((k <= q) & (q < trie.subtree_end))
        assert trie.positions[ancestors].tolist() == list(range(len(ancestors)))
        prefixes.add(tuple(trie.token_ids[ancestors]))
    wanted = {tuple(s.token_ids[:n]) for s in samples for n in range(1, s.num_inputs + 1)}
    assert prefixes == wanted
    assert trie.num_nodes == len(wanted)


@settings(deadline=None)
@given(batches())
def test_every_sampled_token_is_read_where_its_own_prefix_ends(samples: list[Sample]):
    trie = TokenTrie.build(samples)
    index, targets, _, expand = trie.questions()
    assert np.array_equal(index[expand], trie.index)
    assert np.array_equal(targets[expand], trie.targets)
    asked = iter(zip(trie.index, trie.targets, strict=True))
    k = np.arange(trie.num_nodes)
    for each in samples:
        for position in each.positions:
            node, target = next(asked)
            ancestors = (k <= node) & (node < trie.subtree_end)
            assert np.array_equal(trie.token_ids[ancestors], each.token_ids[:position])
            assert target == each.token_ids[position]


@settings(deadline=None)
@given(batches())
def test_neighbours_in_prefix_order_share_at_least_what_any_earlier_one_does(samples: list[Sample]):
    order, shared = prefix_order(samples)
    inputs = [samples[i].token_ids[:-1].tolist() for i in order]

    def common(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))  # noqa: B905

    assert sorted(order) == list(range(len(samples)))
    for place in range(1, len(order)):
        with_earlier = [common(inputs[place], earlier) for earlier in inputs[:place]]
        assert shared[place] == with_earlier[-1] == max(with_earlier)
