"""The planner for Ascend gives every row kernel a block that fits the unified buffer and that the hardware can take."""

from itertools import product

import pytest
from hwgrpo_kernels import ascend_tiles
from hwgrpo_kernels.ascend_tiles import ALIGNMENT, CHIPS, LARGEST_BLOCK, RowKernel, bytes_needed, chip_of, tile_for

KERNELS = [RowKernel(*each) for each in product(ascend_tiles._LIVE, (2, 4), (False, True))]
VOCABS = (1, 2, 63, 64, 65, 517, 4095, 4097, 32_000, 151_936, 262_144, 2**24)
ARCHS = [f"{name}x" for name in CHIPS]
EVERY_CASE = pytest.mark.parametrize(
    "kernel", KERNELS, ids=lambda each: f"{each.op}-{8 * each.itemsize}bit{'-softcap' * each.softcap}"
)


@EVERY_CASE
@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_tile_fits_the_unified_buffer_with_room_to_spare_and_is_an_aligned_power_of_two(kernel, buffers, arch):
    room = chip_of(arch).unified_buffer
    for vocab in VOCABS:
        tile = tile_for(kernel, arch, vocab, buffers)
        assert tile.lanes == 1
        assert tile.block & (tile.block - 1) == 0
        assert tile.block * kernel.itemsize % ALIGNMENT == 0
        assert bytes_needed(kernel, tile.block, buffers) <= 0.8 * room


@EVERY_CASE
@pytest.mark.parametrize("arch", ARCHS)
def test_twice_the_block_of_a_long_row_would_not_fit(kernel, arch):
    tile = tile_for(kernel, arch, 151_936)
    assert tile.block == LARGEST_BLOCK or bytes_needed(kernel, 2 * tile.block) > 0.8 * chip_of(arch).unified_buffer - 32


@EVERY_CASE
def test_a_short_row_gets_a_block_of_less_than_twice_its_length(kernel):
    for vocab in VOCABS:
        block = tile_for(kernel, "Ascend910B2", vocab).block
        assert block < 2 * vocab or block == ascend_tiles.SMALLEST_BLOCK


@EVERY_CASE
def test_blocks_of_a_real_vocabulary_are_long_enough_for_fast_copies(kernel):
    assert tile_for(kernel, "Ascend910B2", 151_936).block * kernel.itemsize >= 4096


def test_a_single_buffer_and_a_larger_unified_buffer_never_make_the_block_smaller():
    for kernel in KERNELS:
        two = tile_for(kernel, "Ascend910B2", 151_936).block
        assert tile_for(kernel, "Ascend910B2", 151_936, buffers=1).block >= two
        assert tile_for(kernel, "Ascend950PR", 151_936).block >= two


def test_bytes_are_those_of_vectors_and_of_the_logits_in_flight():
    assert bytes_needed(RowKernel("row_stats", 2, False), 1024) == 7 * 4096 + 2 * 2048
    assert bytes_needed(RowKernel("row_grad", 4, True), 1024) == 9 * 4096 + 2 * 2 * 4096
    assert bytes_needed(RowKernel("row_stats", 2, False), 1, buffers=1) == 8 * 32


def test_a_program_per_vector_core_stays_far_below_the_largest_grid():
    for arch in ARCHS:
        programs = tile_for(KERNELS[0], arch, 151_936).per_processor * ascend_tiles.vector_cores({}, arch)
        assert 0 < programs <= ascend_tiles.LARGEST_GRID


def test_the_driver_is_believed_about_its_cores_and_the_table_asked_where_it_is_silent():
    assert ascend_tiles.vector_cores({"num_vectorcore": 50}, "Ascend910B1") == 50
    assert ascend_tiles.vector_cores({}, "Ascend910B2") == 48
    assert ascend_tiles.vector_cores({}, "Ascend910_9391") == 48


def test_an_unknown_chip_is_taken_for_the_smallest():
    assert chip_of("Ascend999Z").unified_buffer == min(chip.unified_buffer for chip in CHIPS.values())
    assert chip_of("Ascend999Z").vector_cores == min(chip.vector_cores for chip in CHIPS.values())


def test_every_chip_says_where_its_numbers_come_from():
    assert all(chip.source for chip in CHIPS.values())
