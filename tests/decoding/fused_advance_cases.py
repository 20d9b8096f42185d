"""The kernel of a search step against the plain step: on a GPU, or in Triton's interpreter."""

import math

import pytest
import torch
from test_recorded_search import SETTINGS, make_batch, make_model, plain, shake
from torch import Tensor

from qknorm.decoding.fused_advance import advance_fused
from qknorm.decoding.recorded_search import FusedBoard, RecordedSearch
from qknorm.decoding.search import Rules, Slots, advance, open_slots, penalties
from qknorm.specials import END

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run_both(
    logits_of: list[Tensor], beam: int, limits: Tensor, rules: Rules, dtype: torch.dtype
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """After each step what the kernel left, and the reference."""
    sentences, steps = len(limits), len(logits_of)
    start = open_slots(limits, beam, steps)
    mine, expected = (Slots(*(field.clone() for field in start)) for _ in range(2))
    last_bk = torch.zeros(sentences, beam, dtype=torch.long, device=DEVICE)
    running_b = torch.ones(sentences, dtype=torch.bool, device=DEVICE)
    mask = torch.full((sentences, beam, steps * beam), -math.inf, device=DEVICE, dtype=dtype)
    reference_mask, both = mask.clone(), []
    for number, logits in enumerate(logits_of):
        length = torch.tensor([number + 1], device=DEVICE)
        places = slice(number * beam, (number + 1) * beam)
        fresh = torch.randn(sentences, beam, beam, device=DEVICE).to(dtype)  # any mask, so that mistakes show
        mask[:, :, places], reference_mask[:, :, places] = fresh, fresh
        advance_fused(mine, logits, length, rules, last_bk=last_bk, running_b=running_b, mask_bkp=mask)
        expected, origin_bk, expected_running_b = advance(expected, logits.float().log_softmax(-1), length, rules)
        reference_mask = reference_mask.gather(1, origin_bk[:, :, None].expand_as(reference_mask))
        ours = [*mine, last_bk, running_b, mask]
        theirs = [*expected, expected.tokens_bkt[:, :, number], expected_running_b, reference_mask]
        both.append(([each.clone() for each in ours], [each.clone() for each in theirs]))
    return both


@pytest.mark.parametrize(
    ("beam", "types", "nbest"),
    [(1, 7, 1), (2, 40, 2), (3, 7, 1), (4, 40, 4), (5, 9, 2), (8, 5, 8), (3, 5_000, 1)],
)
def test_the_kernel_makes_the_plain_step(beam: int, types: int, nbest: int) -> None:
    steps, sentences = (4, 3) if types > 1_000 else (7, 4)
    limits = torch.randint(2, steps + 1, (sentences,), device=DEVICE)
    limits[0] = steps
    logits_of = [2 * torch.randn(sentences, beam, types, device=DEVICE) for _ in range(steps)]
    for logits in logits_of:
        logits[:, :, END] += math.log(types) - 1  # some end here and there
        logits[:, :, 5 :: types // 7 + 2] = -math.inf
    rules = Rules(nbest, 0, penalties(steps, 0.6).to(DEVICE))
    for ours, theirs in run_both(logits_of, beam, limits, rules, torch.float32):
        for mine, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision_are_read_as_they_are(dtype: torch.dtype) -> None:
    """As a decoder gives them, in rows that are longer than there are types."""
    rows = [2 * torch.randn(3, 4, 48, device=DEVICE).to(dtype) for _ in range(4)]
    limits = torch.full((3,), 4, device=DEVICE)
    for each in rows:
        each[:, :, END] += 2
        each[:, :, 7::9] = -math.inf
        each[:, :, 37:] = 99.0
    rules = Rules(2, 0, penalties(4, 0.6).to(DEVICE))
    both = run_both([each[:, :, :37] for each in rows], 4, limits, rules, torch.float32)
    assert int(both[-1][0][0].max()) < 37
    for ours, theirs in both:
        for mine, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def test_of_equals_the_lowest_index_wins() -> None:
    steps, beam = 5, 4
    limits = torch.full((8,), steps, device=DEVICE)
    # two, four or eight types of one probability: sums of such logarithms tie all the time
    logits_of = [torch.rand(8, beam, 8, device=DEVICE).argsort(-1).float() for _ in range(steps)]
    for logits in logits_of:
        count = 2 ** torch.randint(1, 4, (8, beam, 1), device=DEVICE)
        logits.copy_(torch.zeros_like(logits).masked_fill(logits >= count, -math.inf))
    rules = Rules(1, 0, penalties(steps, 0.0).to(DEVICE))
    for ours, theirs in run_both(logits_of, beam, limits, rules, torch.bfloat16):
        assert torch.equal(ours[0], theirs[0])  # tokens
        torch.testing.assert_close(ours[1], theirs[1], atol=1e-5, rtol=1e-5)


def test_a_sentence_that_can_only_end_too_early_breaks_off() -> None:
    logits_of = [torch.randn(3, 2, 9, device=DEVICE) for _ in range(3)]
    logits_of[0][1] = -math.inf
    logits_of[0][1, :, END] = 0.0
    limits = torch.full((3,), 3, device=DEVICE)
    rules = Rules(1, 0, penalties(3, 0.6).to(DEVICE))
    for ours, theirs in run_both(logits_of, 2, limits, rules, torch.float32):
        assert ours[1][1].tolist() == [-math.inf] * 2 and not ours[-2][1]
        for mine, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def test_no_numbers_are_seen() -> None:
    logits = torch.randn(3, 2, 9, device=DEVICE)
    logits[1, 0, 4] = math.nan
    limits = torch.full((3,), 4, device=DEVICE)
    rules = Rules(1, 0, penalties(4, 0.6).to(DEVICE))
    ((ours, theirs),) = run_both([logits], 2, limits, rules, torch.float32)
    assert ours[1].isnan().any(1).tolist() == theirs[1].isnan().any(1).tolist() == [False, True, False]
    assert ours[-2].tolist() == [True, False, True]


@pytest.mark.parametrize(("options", "beam"), [(SETTINGS[0], 3), (SETTINGS[1], 1)])
def test_a_whole_search_by_the_kernel_finds_what_the_plain_one_finds(options: dict[str, object], beam: int) -> None:
    model = make_model(options, 1, 2.0, DEVICE.type).double()
    recorded = RecordedSearch(model, torch.float64, fused=True)
    source, limits = make_batch([3, 9, 4, 7, 2], 8)
    for _ in range(2):
        expected = plain(model, source.to(DEVICE), limits.to(DEVICE), beam, nbest=beam)
        found = recorded(source, limits, beam=beam, nbest=beam)
        assert [[each.tokens for each in some] for some in found] == [
            [each.tokens for each in some] for some in expected
        ]
        for some, reference in zip(found, expected, strict=True):
            assert [each.score for each in some] == pytest.approx([each.score for each in reference], abs=1e-5)
        shake(model)
    assert all(isinstance(made.board, FusedBoard) for made in recorded._made.values())
