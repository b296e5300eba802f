"""What the meter counts, on operations whose cost is worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from visual_grpo.common.phases import alike, map_alike
from visual_grpo.models.offload import copied_bytes, device_tensors, enable_offload, move_to_host, on_device
from visual_grpo.operations.plan.dry_run import on_other_cards
from visual_grpo.operations.plan.meter import OUTSIDE, Meter, Phase

FLOAT = 4


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def counted(meter: Meter) -> Phase:
    return meter.phases[OUTSIDE]


def test_products_and_convolutions_are_counted_by_hand():
    with Meter() as meter:
        with meter.phase("product"):
            meta(3, 4) @ meta(4, 5)
        F.conv2d(meta(2, 3, 8, 8), meta(5, 3, 3, 3), padding=1)
    product, convolution = meter.phases["product"], counted(meter)
    assert (product.flops, product.moved) == (2 * 3 * 4 * 5, FLOAT * (3 * 4 + 4 * 5 + 3 * 5))
    assert convolution.flops == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
    assert (product.kernels, convolution.kernels) == (1, 1)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_fused_forward_and_backward(masked):
    query, key = meta(2, 3, 50, 8), meta(2, 3, 70, 8)
    query.requires_grad_()
    mask = meta(2, 1, 50, 70, dtype=torch.bool) if masked else None
    with Meter() as meter:
        out = F.scaled_dot_product_attention(query, key, key, mask)
        forward = counted(meter).flops
        out.backward(out.detach())
    product = 2 * 2 * 3 * 50 * 70 * 8
    assert forward == 2 * product, "queries with keys, weights with values"
    assert counted(meter).flops - forward == 5 * product
    assert meter.peak < FLOAT * 2 * 3 * 50 * 70 or masked, "the weights are never held"


def test_views_are_no_kernels_and_an_expanded_tensor_is_read_once():
    tensor = meta(1, 6)
    with Meter() as meter:
        wide = tensor.t().reshape(1, 6)[:, 1:].expand(100, 5)
        torch.empty_like(tensor)
        assert not counted(meter).kernels
        wide + 1
    assert (counted(meter).kernels, counted(meter).moved) == (1, FLOAT * (6 + 500))


def test_the_peak_is_of_what_is_alive_at_once():
    with Meter() as meter:
        meter.hold([weight := meta(10)])
        first = meta(100)
        view = first[:50]
        del first
        assert meter.live == FLOAT * 110, "a view keeps its memory"
        del view
        second = meta(60)
        del second
    assert meter.live == FLOAT * len(weight)
    assert meter.peak == FLOAT * 110


def test_a_phase_counts_its_own_and_a_weight_multiplies_all_but_memory():
    tensor = meta(8, 8)
    with Meter() as meter, meter.phase("outer"):
        with meter.phase("inner"), meter.weighted(3), meter.weighted(2):
            kept = tensor @ tensor
        kept + 1
    inner, outer = meter.phases["inner"], meter.phases["outer"]
    assert (inner.flops, inner.kernels, inner.peak, inner.rest) == (6 * 2 * 8**3, 6, FLOAT * 64, FLOAT * 64)
    assert (outer.kernels, outer.peak, outer.rest) == (1, FLOAT * 128, FLOAT * 64)


def test_repeated_work_is_counted_for_all_and_its_results_have_every_row():
    meter = Meter()
    with meter.counting():
        with meter.phase("batches"):
            results = map_alike(lambda rows: rows + 1, meta(10, 4).split(4))
        with meter.phase("steps"):
            assert list(alike(range(5))) == [0, 1]
            for step in alike(range(5)):
                meta(1) + (meta(1) if step else 0)
    assert [len(rows) for rows in results] == [4, 4, 2]
    assert (meter.phases["batches"].kernels, meter.phases["batches"].moved) == (3, FLOAT * 2 * 10 * 4)
    assert meter.phases["steps"].kernels == 5
    assert list(alike(range(5))) == list(range(5)), "all of them, where nothing counts"


def test_what_follows_from_small_whole_numbers_alone_is_of_the_device():
    with Meter() as meter:
        mask = torch.tensor([[1, 0], [1, 1]]).to("meta") > 0
        assert meter.live == 4
        hidden = torch.where(mask, 0.0, -torch.inf)
        assert hidden.is_meta
        assert meter.live == 4 + FLOAT * 4
        assert (hidden.cpu() + 1).device.type == "cpu"


def test_the_host_gets_the_values_of_small_whole_numbers():
    with Meter():
        ids = torch.tensor([[5, 0, 7], [0, 0, 9]]).to("meta")
        mask = ids > 0
        assert ids[mask].shape == (3,)
        assert mask.sum(1).tolist() == [2, 1]
        assert mask.nonzero().shape == (3, 2)
        ids[:, 1] = 4
        assert ids.cpu().tolist() == [[5, 4, 7], [0, 4, 9]]
        positions = torch.zeros(2, 3, dtype=torch.long, device="meta")
        positions[0, mask[0]] = torch.arange(2, device="meta")
        assert positions.tolist() == [[0, 0, 1], [0, 0, 0]]
        values, inverse = torch.tensor([3, 1, 3]).to("meta").unique(return_inverse=True)
        assert (values.tolist(), inverse.tolist()) == ([1, 3], [1, 0, 1])
        assert ids.sum().item() == 29


def test_unknown_values_are_finite_and_of_the_greatest_length():
    with Meter():
        floats = meta(3)
        assert floats.sum().item() == 0.0
        assert (floats > 0).cpu().tolist() == [True] * 3
        assert not bool((floats > 0).all())
        unknown = (floats > 0).long()
        assert unknown.sum().item() != 3
        for made, total in (
            (torch.ones_like(unknown), 3),
            (torch.zeros_like(unknown), 0),
            (torch.full_like(unknown, 4), 12),
            (unknown.new_ones(2, dtype=torch.long), 2),
            (unknown.new_full((5,), 3), 15),
        ):
            assert made.sum().item() == total


def test_what_waits_on_the_host_is_not_counted():
    large, small = (nn.Linear(width, width, bias=False, device="meta").requires_grad_(False) for width in (64, 8))
    enable_offload({"large": large, "small": small}, torch.device("meta"))
    with Meter() as meter:
        meter.hold([*device_tensors(large), *device_tensors(small)])
        assert meter.live == 0
        large(meta(1, 64))
        assert meter.live == FLOAT * 64 * 64
        with on_device(small):
            assert meter.live == FLOAT * 8 * 8
        move_to_host(small)
        assert meter.live == 0
    assert meter.peak == FLOAT * (64 * 64 + 2 * 64), "with its input and result"
    assert copied_bytes(large, small) == FLOAT * (64 * 64 + 8 * 8)


def test_a_sharded_card_holds_its_part_and_two_whole_blocks():
    blocks = [nn.Linear(8, 8).requires_grad_(False) for _ in range(10)]
    blocks[0].register_parameter("lora", nn.Parameter(torch.zeros(1000)))
    block = FLOAT * (8 * 8 + 8)
    assert on_other_cards(blocks, 4) == 10 * block - 10 * block // 4 - 2 * block
