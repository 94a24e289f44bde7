"""The planner for Ascend gives every row kernel a block that fits the unified buffer and that the hardware can take."""

from itertools import product

from hwgrpo_kernels import ascend_tiles
from hwgrpo_kernels.ascend_tiles import ALIGNMENT, CHIPS, LARGEST_BLOCK, RowKernel, bytes_needed, chip_of, tile_for

KERNELS = [RowKernel(*each) for each in product(ascend_tiles._LIVE, (2, 4), (False, True))]
VOCABS = (1, 2, 63, 64, 65, 517, 4095, 4097, 32_000, 151_936, 262_144, 2**24)
ARCHS = [f"{name}x" for name in CHIPS]


def test_a_tile_fits_the_unified_buffer_with_room_to_spare_and_is_an_aligned_power_of_two():
    for kernel, arch, buffers, vocab in product(KERNELS, ARCHS, (1, 2), VOCABS):
        tile = tile_for(kernel, arch, vocab, buffers)
        case = kernel, arch, buffers, vocab, tile
        assert tile.lanes == 1, case
        assert tile.block & (tile.block - 1) == 0, case
        assert tile.block * kernel.itemsize % ALIGNMENT == 0, case
        assert bytes_needed(kernel, tile.block, buffers) <= 0.8 * chip_of(arch).unified_buffer, case


def test_twice_the_block_of_a_long_row_would_not_fit():
    for kernel, arch in product(KERNELS, ARCHS):
        block, room = tile_for(kernel, arch, 151_936).block, 0.8 * chip_of(arch).unified_buffer - 32
        assert block == LARGEST_BLOCK or bytes_needed(kernel, 2 * block) > room, (kernel, arch)


def test_a_short_row_gets_a_block_of_less_than_twice_its_length():
    for kernel, vocab in product(KERNELS, VOCABS):
        block = tile_for(kernel, "Ascend910B2", vocab).block
        assert block < 2 * vocab or block == ascend_tiles.SMALLEST_BLOCK, (kernel, vocab)


def test_blocks_of_a_real_vocabulary_are_long_enough_for_fast_copies():
    for kernel in KERNELS:
        assert tile_for(kernel, "Ascend910B2", 151_936).block * kernel.itemsize >= 4096, kernel


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
