import torch

from agentrl.train.partition import join_parts, part_numel, recut, split_parts


def cut(whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Parts of all ranks, the padding marked with -1."""
    size = part_numel(len(whole), ranks)
    padded = torch.cat([whole, torch.full((size * ranks - len(whole),), -1.0)])
    return list(padded.split(size))


def test_seven_elements_of_three_ranks_for_two():
    old = cut(torch.arange(7.0), 3)  # [0 1 2] [3 4 5] [6 - -]
    parts = [recut(lambda r: old[r], 7, old_ranks=3, rank=rank, ranks=2) for rank in range(2)]
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 0]]


def test_every_pair_of_rank_counts_gives_the_whole_back():
    for numel in (1, 2, 5, 12, 13):
        whole = torch.arange(float(numel))
        for old_ranks in range(1, 6):
            old = cut(whole, old_ranks)
            for ranks in range(1, 6):
                parts = [
                    recut(old.__getitem__, numel, old_ranks=old_ranks, rank=r, ranks=ranks)
                    for r in range(ranks)
                ]
                assert {len(part) for part in parts} == {part_numel(numel, ranks)}
                assert torch.equal(torch.cat(parts)[:numel], whole)
                assert not torch.cat(parts)[numel:].any()


def test_a_rank_asks_only_for_the_parts_that_overlap_its_own():
    old, asked = cut(torch.arange(8.0), 4), []

    def old_part(rank: int) -> torch.Tensor:
        asked.append(rank)
        return old[rank]

    assert recut(old_part, 8, old_ranks=4, rank=2, ranks=4).tolist() == [4.0, 5.0]
    assert asked == [2]


def test_a_flat_tensor_is_split_by_name_and_joined_in_another_order():
    parts = split_parts(torch.arange(6.0), [("a", 3), ("b", 7)], ranks=2)  # 2 and 4 elements
    assert parts["a"].tolist() == [0.0, 1.0]
    assert parts["b"].tolist() == [2.0, 3.0, 4.0, 5.0]
    joined = join_parts(lambda name, numel: parts[name], [("b", 7), ("a", 3)])
    assert joined.tolist() == [2.0, 3.0, 4.0, 5.0, 0.0, 1.0]
