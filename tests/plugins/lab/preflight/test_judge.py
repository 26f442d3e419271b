"""Which ranks, nodes and links a preflight names."""

import math

import msgspec
import pytest

from tests.plugins.lab.preflight.ranks import (
    SPEEDS,
    change,
    healthy,
    on_shared_cards,
    racked,
    scale,
    slow_pairs,
)
from vitals_plugins.lab.preflight.judge import Baseline, judge
from vitals_plugins.lab.preflight.report import (
    DONE,
    STAGES,
    ClockOffset,
    clock_offset,
    num_turns,
    pair_of,
)


def found(reports, **options):
    """Return kind, ranks and nodes of each finding."""
    return [(each.kind, each.ranks, each.nodes) for each in judge(reports, **options)]


@pytest.mark.parametrize("num", [1, 2, 3, 4, 8, 17])
def test_healthy_ranks_have_no_finding(num):
    for seed in range(50):
        assert [] == found(healthy(num, per_node=2, seed=seed))
        assert [] == found(healthy(num, seed=seed, gpu=True, noise=0.03))


@pytest.mark.parametrize("num", [3, 4, 8])
def test_a_rank_throttled_to_30_percent_is_named(num):
    for seed in range(20):
        rank = seed % num
        reports = scale(healthy(num, seed=seed), rank, 0.3, "gemm_flops_per_second")
        reports = slow_pairs(reports, lambda a, b, rank=rank: rank in (a, b), 0.3)
        # Its slow exchanges follow from it, so there is one finding.
        assert [("slow_rank", (rank,), (f"n{rank}",))] == found(reports)


def test_a_gpu_at_three_quarters_of_its_clock_is_named_but_not_a_busy_core():
    gpus = scale(healthy(8, gpu=True, noise=0.02), 5, 0.75, "gemm_flops_per_second")
    assert [("slow_rank", (5,), ("n5",))] == found(gpus)
    assert [] == found(scale(healthy(8, noise=0.02), 5, 0.75, "gemm_flops_per_second"))


def test_a_slow_disk_is_named_by_its_writes_and_its_sync():
    for seed in range(20):
        reports = scale(healthy(4, seed=seed), 2, 0.1, "disk_bytes_per_second")
        reports = scale(reports, 2, 40, "fsync_seconds")
        (finding,) = judge(reports)
        assert ("slow_rank", ("n2",)) == (finding.kind, finding.nodes)
        assert "checkpoint write" in finding.text
        assert "fsync" in finding.text
        assert "matrix product" not in finding.text


def test_a_sync_of_some_milliseconds_is_no_fault():
    reports = scale(healthy(4), 2, 0.01, "fsync_seconds")
    assert [] == found(scale(reports, 3, 15.0, "fsync_seconds"))
    (finding,) = judge(scale(reports, 3, 80.0, "fsync_seconds"))
    assert ("slow_rank", ("n3",)) == (finding.kind, finding.nodes)
    assert "the other ranks (at most 20 ms)" in finding.text


def test_a_disk_without_space_is_a_note():
    reports = healthy(4)
    figures = {**reports[2].figures}
    del figures["disk_bytes_per_second"], figures["fsync_seconds"]
    (finding,) = judge(change(reports, 2, figures=figures))
    assert ("disk_full", "note") == (finding.kind, finding.severity)
    assert [] == [
        each.kind
        for each in judge(change(reports, 2, figures=figures, errors={"disk": "no directory"}))
        if each.kind == "disk_full"
    ]


def test_ranks_of_one_node_share_its_disk():
    reports = scale(healthy(4, per_node=4), 2, 0.1, "disk_bytes_per_second")
    assert [] == found(reports)
    reports = healthy(8, per_node=2)
    for rank in (4, 5):
        reports = scale(reports, rank, 0.1, "disk_bytes_per_second")
    assert [("slow_rank", (4,), ("n2",))] == found(reports)


def test_two_of_five_slow_ranks_are_both_named():
    reports = healthy(5)
    for rank in (1, 3):
        reports = scale(reports, rank, 0.3, "gemm_flops_per_second")
    assert [(1,), (3,)] == [each.ranks for each in judge(reports)]


def test_scatter_as_large_as_the_difference_names_no_rank():
    reports = healthy(5, noise=0.0)
    for rank, factor in enumerate((0.5, 0.7, 1.0, 1.3, 1.6)):
        reports = scale(reports, rank, factor, "gemm_flops_per_second")
    assert [] == found(reports)


def test_a_disk_of_a_tenth_is_slow_although_the_others_differ_by_half():
    reports = healthy(3, noise=0.0)
    for rank, factor in enumerate((0.1, 1.0, 1.5)):
        reports = scale(reports, rank, factor, "disk_bytes_per_second")
    assert [("slow_rank", (0,), ("n0",))] == found(reports)


@pytest.mark.parametrize(("cores", "is_named"), [(6, True), (5, False)])
def test_a_loader_is_compared_only_if_its_processes_have_cores(cores, is_named):
    reports = scale(healthy(6, per_node=2), 3, 0.2, "loader_bytes_per_second")
    reports = [msgspec.structs.replace(r, limits={**r.limits, "cores": cores}) for r in reports]
    assert ([("slow_rank", (3,), ("n1",))] if is_named else []) == found(reports)


def test_equal_figures_are_not_a_finding():
    assert [] == found(healthy(4, noise=0.0))


def test_ranks_of_another_device_are_not_compared():
    reports = scale(healthy(6), 5, 0.1, "gemm_flops_per_second")
    assert [] == found(change(reports, 5, device="another"))


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_a_figure_that_is_no_speed_is_ignored(value):
    reports = healthy(4)
    figures = {**reports[1].figures, "gemm_flops_per_second": value}
    assert [] == found(change(reports, 1, figures=figures))
    assert [] == found(change(reports, 1, offset=ClockOffset(math.nan, math.nan)))


class TestTwoRanks:
    def test_the_slower_is_named_below_half_of_the_other(self):
        reports = scale(healthy(2), 1, 0.3, "gemm_flops_per_second")
        assert [("slow_rank", (1,), ("n1",))] == found(reports)

    def test_between_both_bounds_both_figures_are_reported_without_a_culprit(self):
        reports = scale(healthy(2, noise=0.0), 1, 0.55, "gemm_flops_per_second")
        (finding,) = judge(reports)
        assert ("unequal_ranks", "note", ()) == (finding.kind, finding.severity, finding.nodes)
        assert "5.5e+09 FLOP/s on rank 1 of n1, 1e+10 FLOP/s on rank 0 of n0" in finding.text

    def test_history_names_the_slower(self):
        reports = scale(healthy(2, noise=0.0), 1, 0.41, "loader_bytes_per_second")
        reports = scale(reports, 1, 0.4, "gemm_flops_per_second")
        baselines = {"n1": Baseline("Xeon", (SPEEDS,) * 3), "n0": Baseline("Xeon", (SPEEDS,) * 3)}
        assert [("slow_rank", (1,), ("n1",))] == found(reports, baselines=baselines)

    def test_a_single_link_has_no_reference(self):
        assert [] == found(slow_pairs(healthy(2), lambda a, b: True, 0.01))

    def test_skewed_clocks_are_reported_without_a_culprit(self):
        reports = change(healthy(2), 1, offset=ClockOffset(3.0, 0.001))
        assert [("clock_skew", (1,), ())] == found(reports)


class TestHistory:
    def test_a_node_alone_is_compared_with_its_history(self):
        reports = scale(healthy(2, per_node=2, noise=0.0), 0, 0.3)
        reports = scale(reports, 1, 0.3)
        assert [] == found(reports)
        baselines = {"n0": Baseline("Xeon", (SPEEDS,) * 3)}
        named = found(reports, baselines=baselines)
        assert [("slow_rank", (0,), ("n0",)), ("slow_rank", (1,), ("n0",))] == named

    def test_few_checks_or_another_device_are_no_reference(self):
        reports = scale(healthy(1), 0, 0.3)
        assert [] == found(reports, baselines={"n0": Baseline("Xeon", (SPEEDS,) * 2)})
        assert [] == found(reports, baselines={"n0": Baseline("old", (SPEEDS,) * 9)})

    def test_a_matrix_product_that_became_slower_is_slow(self):
        reports = scale(healthy(1, noise=0.0), 0, 0.05, "gemm_flops_per_second")
        (finding,) = judge(reports, baselines={"n0": Baseline("Xeon", (SPEEDS,) * 3)})
        assert "5e+08 FLOP/s, 5% of the speed of 3 earlier checks" in finding.text

    def test_a_disk_that_all_nodes_share_now_is_not_compared_with_a_node_checked_alone(self):
        for num in (1, 8):
            reports = healthy(num)
            for rank in range(num):
                reports = scale(reports, rank, 1 / 8, "disk_bytes_per_second")
                reports = scale(reports, rank, 8, "fsync_seconds")
            baselines = {f"n{rank}": Baseline("Xeon", (SPEEDS,) * 3) for rank in range(num)}
            assert [] == found(reports, baselines=baselines)

    def test_most_nodes_slower_than_before_is_a_note_without_a_node(self):
        # Only half of the nodes have a history.
        baselines = {f"n{rank}": Baseline("Xeon", (SPEEDS,) * 3) for rank in range(4)}
        reports = healthy(8)
        for rank in range(8):
            reports = scale(reports, rank, 0.2, "loader_bytes_per_second")
        (finding,) = judge(reports, baselines=baselines)
        assert ("slower_nodes", "note", ()) == (finding.kind, finding.severity, finding.nodes)
        assert "loader: n0 and 3 more nodes" in finding.text


class TestLinks:
    def test_a_slow_link_is_named_and_neither_end(self):
        for seed in range(20):
            reports = healthy(4 + seed % 5, seed=seed)
            reports = slow_pairs(reports, lambda a, b: {a, b} == {1, 2})
            assert [("slow_link", (1, 2), ())] == found(reports)

    @pytest.mark.parametrize("num", [3, 4, 5, 8])
    def test_a_slow_network_card_is_named_as_its_node(self, num):
        for seed in range(20):
            rank = seed % num
            reports = racked(healthy(num, seed=seed), "r0")
            reports = slow_pairs(reports, lambda a, b, rank=rank: rank in (a, b))
            assert [("slow_network", (rank,), (f"n{rank}",))] == found(reports)

    def test_links_inside_of_a_node_are_no_reference_for_links_between_nodes(self):
        reports = healthy(8, per_node=4)
        reports = slow_pairs(reports, lambda a, b: a // 4 != b // 4, 0.05)
        assert [] == found(reports)

    def test_a_link_between_two_nodes_is_one_finding(self):
        reports = healthy(8, per_node=2)
        reports = slow_pairs(reports, lambda a, b: {a // 2, b // 2} == {0, 3})
        (finding,) = judge(reports)
        assert ("slow_link", (0, 1, 6, 7)) == (finding.kind, finding.ranks)
        assert "between n0 and n3" in finding.text

    def test_two_racks_are_a_note_without_a_node(self):
        for num, first in ((4, 2), (8, 4), (8, 6), (8, 5), (6, 2), (9, 4), (16, 14)):
            for seed in range(5):
                reports = healthy(num, seed=seed, gpu=True)
                reports = slow_pairs(
                    reports, lambda a, b, first=first: (a < first) != (b < first), 0.45
                )
                (finding,) = judge(reports)
                expected = ("link_groups", "note", ())
                assert expected == (finding.kind, finding.severity, finding.nodes), (num, first)

    def test_two_slow_cards_are_named(self):
        for seed in range(20):
            reports = racked(healthy(8, seed=seed), "r0")
            reports = slow_pairs(reports, lambda a, b: {a, b} & {2, 5} != set())
            assert [("n2",), ("n5",)] == [each.nodes for each in judge(reports)]

    def test_nvlink_bridges_between_pairs_of_gpus_are_a_note(self):
        # Four A100 PCIe: 0-1 and 2-3 have bridges.
        for num in (4, 8):
            reports = healthy(num, per_node=4, gpu=True)
            reports = slow_pairs(reports, lambda a, b: a // 2 != b // 2 and a // 4 == b // 4, 0.1)
            (finding,) = judge(reports)
            expected = ("unequal_links", "note", ())
            assert expected == (finding.kind, finding.severity, finding.nodes)

    def test_gpus_with_one_or_two_links_and_none_are_a_note(self):
        # DGX-1 V100: a GPU has NVLink to four others, and PCIe to three.
        linked = {(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 5), (2, 3), (2, 6), (3, 7),
                  (4, 5), (4, 6), (4, 7), (5, 6), (5, 7), (6, 7)}  # fmt: skip
        reports = healthy(8, per_node=8, gpu=True)
        reports = slow_pairs(reports, lambda a, b: (min(a, b), max(a, b)) not in linked)
        (finding,) = judge(reports)
        assert ("unequal_links", "note", ()) == (finding.kind, finding.severity, finding.nodes)

    def test_one_fast_pair_of_two_nodes_is_no_reference(self):
        reports = healthy(16, per_node=8, gpu=True)
        assert [] == found(slow_pairs(reports, lambda a, b: {a, b} == {0, 8}, 10))

    def test_rails_that_are_faster_than_other_pairs_name_no_node(self):
        for num, per_node in ((4, 2), (16, 8), (32, 8)):
            reports = healthy(num, per_node=per_node, gpu=True)
            reports = slow_pairs(
                reports,
                lambda a, b, n=per_node: a // n != b // n and a % n != b % n,
                0.3,
            )
            assert [] == [each for each in judge(reports) if each.severity == "fail"]

    def test_slow_links_of_ranks_in_a_note_are_reported(self):
        reports = scale(healthy(5, noise=0.0), 1, 0.55, "gemm_flops_per_second")
        for rank in (1, 2):  # two ranks of another device, which have no majority
            reports = change(reports, rank, device="H100")
        reports = slow_pairs(reports, lambda a, b: {a, b} == {1, 2})
        assert ["slow_link", "unequal_ranks"] == [each.kind for each in judge(reports)]

    def test_a_slow_rank_does_not_hide_the_slow_card_of_another_node(self):
        reports = scale(racked(healthy(8), "r0"), 6, 0.3, "gemm_flops_per_second")
        reports = slow_pairs(reports, lambda a, b: 2 in (a, b))
        assert [("n6",), ("n2",)] == [each.nodes for each in judge(reports)]

    def test_a_card_of_one_rank_of_a_node_names_rank_and_node(self):
        reports = racked(healthy(8, per_node=2), "r0")
        reports = slow_pairs(reports, lambda a, b: 3 in (a, b) and a // 2 != b // 2)
        assert [("slow_network", (3,), ("n1",))] == found(reports)

    @pytest.mark.parametrize("num", [3, 4, 8])
    @pytest.mark.parametrize("is_gpu", [False, True])
    def test_a_node_with_slow_links_may_stand_in_another_rack(self, num, is_gpu):
        for seed in range(5):
            reports = healthy(num, seed=seed, gpu=is_gpu, noise=0.02)
            reports = slow_pairs(reports, lambda a, b: 1 in (a, b), 0.3)
            (finding,) = judge(reports)
            assert ("slow_network", "note", (1,), ()) == _summary(finding)
            assert "unknown whether it is in another rack" in finding.text
            assert "VITALS_RACK" in finding.hint
            # No rack explains less than a tenth, but a node is not excluded without evidence.
            reports = slow_pairs(reports, lambda a, b: 1 in (a, b), 0.3)
            assert ("slow_network", "fail", (1,), ()) == _summary(judge(reports)[0])

    @pytest.mark.parametrize("racks", ["001", "0001", "00011", "000111", "0001112"])
    def test_slower_links_between_known_racks_name_no_node(self, racks):
        for seed in range(5):
            reports = racked(healthy(len(racks), seed=seed), *racks)
            reports = slow_pairs(reports, lambda a, b: racks[a] != racks[b], 0.3)
            assert [] == [each for each in judge(reports) if each.severity == "fail"]
            assert [] == [each for each in judge(reports) if each.nodes]

    @pytest.mark.parametrize("racks", ["0001", "00011", "000111", "00000122"])
    def test_a_slow_card_is_named_in_a_cluster_with_slower_links_between_racks(self, racks):
        for seed in range(5):
            reports = racked(healthy(len(racks), seed=seed), *racks)
            reports = slow_pairs(reports, lambda a, b: racks[a] != racks[b], 0.45)
            reports = slow_pairs(reports, lambda a, b: 0 in (a, b))
            assert [("n0",)] == [each.nodes for each in judge(reports)]

    def test_a_node_whose_rack_is_unknown_makes_all_unknown(self):
        reports = slow_pairs(racked(healthy(4), "0", "0", "0", ""), lambda a, b: 3 in (a, b))
        assert [()] == [each.nodes for each in judge(reports)]

    @pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 8, 8, 4), (4, 4, 1), (2, 2, 1), (8, 8, 1),
                                       (2, 2, 2, 2), (4, 8), (1, 1, 8)])  # fmt: skip
    @pytest.mark.parametrize("card", [1.0, 2.0, 8.0])
    def test_ranks_that_share_a_network_card_are_no_slow_network(self, sizes, card):
        for is_gpu in (False, True):
            reports = on_shared_cards(sizes, card=card, noise=0.02, gpu=is_gpu)
            assert [] == found(reports)
            assert [] == found(racked(reports, "r0"))

    @pytest.mark.parametrize("lone", [1, 2, 3])
    @pytest.mark.parametrize("sizes", [(4,) * 8, (1,) * 20, (8, 8, 8, 8)])
    def test_a_busy_uplink_of_a_rack_names_no_node(self, sizes, lone):
        for uplink in (4.0, 2.0, 1.0, 0.5):
            reports = on_shared_cards(sizes, card=8.0, uplink=uplink, lone=lone, noise=0.02)
            assert [] == [each for each in judge(reports) if each.nodes]
            racks = ["0"] * (len(sizes) - lone) + ["1"] * lone
            assert [] == [each for each in judge(racked(reports, *racks)) if each.nodes]

    def test_a_pair_just_below_the_bound_is_no_single_slow_link(self):
        speeds = {(0, 2): 0.39, (0, 3): 0.42, (1, 2): 0.43, (1, 3): 0.41}
        reports = healthy(4, noise=0.0)
        for pair, factor in speeds.items():
            reports = slow_pairs(reports, lambda a, b, p=pair: {a, b} == {*p}, factor)
        assert [("link_groups", "note", (), ())] == [_summary(each) for each in judge(reports)]

    def test_a_pair_that_was_not_measured_by_both_ends_is_no_fault(self):
        reports = change(healthy(5), 2, pairs=())
        assert [] == found(reports)


def _summary(finding):
    return finding.kind, finding.severity, finding.ranks, finding.nodes


class TestClocks:
    def test_the_formula_of_ntp(self):
        # This clock is 5 s ahead; a message takes 0.25 s, the response is prepared in 1 s.
        offset = clock_offset(105.0, 100.25, 101.25, 106.5)
        assert (5.0, 0.25) == (offset.seconds, offset.uncertainty)

    @pytest.mark.parametrize("num", [3, 4, 7])
    def test_a_skewed_clock_is_named(self, num):
        for seed in range(20):
            rank = seed % num
            reports = change(healthy(num, seed=seed), rank, offset=ClockOffset(-2.0, 0.002))
            assert [("clock_skew", (rank,), (f"n{rank}",))] == found(reports)

    def test_the_reference_of_all_offsets_may_be_skewed_itself(self):
        reports = healthy(4)
        for rank in (1, 2, 3):
            reports = change(reports, rank, offset=ClockOffset(2.0, 0.002))
        assert [("clock_skew", (0,), ("n0",))] == found(reports)

    def test_two_groups_of_equal_size_have_no_culprit(self):
        reports = healthy(4)
        for rank in (1, 2):
            reports = change(reports, rank, offset=ClockOffset(2.0, 0.002))
        assert [("clock_skew", (1,), ()), ("clock_skew", (2,), ())] == found(reports)

    def test_a_skew_within_its_uncertainty_is_not_a_finding(self):
        assert [] == found(change(healthy(4), 2, offset=ClockOffset(2.0, 1.9)))


class TestRanksThatDoNotEnd:
    def test_a_rank_without_a_report_is_named(self):
        assert [("missing_rank", (2,), ())] == found(healthy(4)[:2] + healthy(4)[3:])

    def test_no_report_is_a_failure(self):
        assert [("no_report", (), ())] == found([])

    def test_a_rank_that_hangs_is_the_one_behind_the_others(self):
        reports = [msgspec.structs.replace(r, stage=STAGES.index("join")) for r in healthy(4)]
        reports = change(reports, 1, stage=STAGES.index("disk"), timed_out=True)
        (finding,) = judge(reports)
        assert ("no_answer", (1,), ("n1",)) == (finding.kind, finding.ranks, finding.nodes)
        assert "stopped in disk" in finding.text

    def test_a_rank_that_started_late_and_was_stopped_is_not_named(self):
        stage = STAGES.index("join")
        reports = [msgspec.structs.replace(r, stage=stage, timed_out=True) for r in healthy(4)]
        reports = change(reports, 1, stage=STAGES.index("loader"), timed_out=False)
        assert [("no_answer", (1,), ())] == found(reports)

    def test_all_in_one_collective_have_no_culprit(self):
        reports = [msgspec.structs.replace(r, stage=STAGES.index("pairs")) for r in healthy(4)]
        assert [("no_answer", (0, 1, 2, 3), ())] == found(reports)

    def test_a_killed_rank_is_the_one_without_an_error(self):
        stage = STAGES.index("all-reduce")
        errors = {"all-reduce": "connection closed by peer"}
        reports = [msgspec.structs.replace(r, stage=stage, errors=errors) for r in healthy(4)]
        reports = change(reports, 2, errors={})
        assert ("no_answer", (2,), ("n2",)) in found(reports)

    @pytest.mark.parametrize("stage", ["start", "loader", "gemm", "disk"])
    def test_a_stage_in_which_most_nodes_stop_has_no_culprit(self, stage):
        for num, num_stopped in ((8, 8), (8, 4), (2, 2)):
            reports = [msgspec.structs.replace(r, stage=STAGES.index("join")) for r in healthy(num)]
            for rank in range(num_stopped):
                reports = change(reports, rank, stage=STAGES.index(stage), timed_out=True)
            (finding,) = judge(reports)
            assert ("no_answer", ()) == (finding.kind, finding.nodes)
            assert "it is unknown whether" in finding.text

    def test_nodes_that_wait_for_one_file_server_in_several_stages_have_no_culprit(self):
        stage = STAGES.index("disk")
        reports = [msgspec.structs.replace(r, stage=stage, timed_out=True) for r in healthy(8)]
        reports = change(reports, 3, stage=STAGES.index("start"))
        assert [("no_answer", (3,), ())] == found(reports)

    @pytest.mark.parametrize("num", [1, 8])
    def test_an_error_of_all_nodes_names_none(self, num):
        for text in ("Disk quota exceeded", "Too many open files"):
            reports = [msgspec.structs.replace(r, errors={"disk": text}) for r in healthy(num)]
            (finding,) = judge(reports)
            assert ("failed", ()) == (finding.kind, finding.nodes)
            assert text in finding.text

    def test_a_node_checked_alone_is_named_for_its_gpu_but_not_for_the_file_server(self):
        for stage, nodes in (("gemm", ("n0",)), ("memory", ("n0",)), ("disk", ()), ("start", ())):
            reports = change(healthy(1), 0, stage=STAGES.index(stage), timed_out=True)
            assert [("no_answer", (0,), nodes)] == found(reports)

    def test_small_shared_memory_on_all_nodes_names_none(self):
        limits = {"open_files": 256, "locked_bytes": -1, "shared_bytes": 64000000}
        for num in (1, 8):
            reports = [msgspec.structs.replace(r, limits=limits) for r in healthy(num)]
            assert [(), ()] == [each.nodes for each in judge(reports)]

    def test_the_rank_that_started_first_is_not_named_for_its_timeout(self):
        # Its timer ends first; the others then get errors of the collective.
        stage, errors = STAGES.index("pairs"), {"pairs": "connection closed by peer"}
        reports = [msgspec.structs.replace(r, stage=stage, errors=errors) for r in healthy(8)]
        reports = change(reports, 2, errors={}, timed_out=True)
        assert [()] == [each.nodes for each in judge(reports)]

    def test_a_rank_that_its_launcher_stops_after_the_timeout_is_not_named(self):
        stage = STAGES.index("pairs")
        errors = {"pairs": "connection closed by peer"}
        reports = [
            msgspec.structs.replace(r, stage=stage, errors=errors, timed_out=True)
            for r in healthy(8)
        ]
        reports = change(reports, 2, errors={}, timed_out=False)
        assert [()] == [each.nodes for each in judge(reports)]
        reports = [msgspec.structs.replace(r, errors={}) for r in reports]
        reports = change(reports, 2, stage=stage - 1)
        assert [()] == [each.nodes for each in judge(reports)]

    def test_an_error_in_one_measurement_names_the_node(self):
        reports = change(healthy(4), 1, errors={"disk": "No space left on device"})
        (finding,) = judge(reports)
        assert ("failed", ("n1",)) == (finding.kind, finding.nodes)
        assert "disk failed: No space left on device" in finding.text


class TestLimitsAndVersions:
    def test_small_shared_memory_is_named(self):
        # The image and the launcher set it: no node is at fault.
        limits = {"open_files": 65536, "locked_bytes": -1, "shared_bytes": 1 << 20}
        assert [("small_limit", (1,), ())] == found(change(healthy(4), 1, limits=limits))

    def test_the_minority_has_the_wrong_version(self):
        versions = {"torch": "2.12.0", "kernel": "6.1"}
        reports = change(healthy(4), 3, versions=versions)
        assert [("different_versions", (), ("n3",))] == found(reports)

    def test_of_two_versions_on_two_nodes_neither_is_wrong(self):
        reports = change(healthy(2), 1, versions={"torch": "2.12.0", "kernel": "6.1"})
        assert [("different_versions", (), ())] == found(reports)

    def test_another_kernel_is_a_note(self):
        reports = change(healthy(4), 3, versions={"torch": "2.13.0", "kernel": "5.0"})
        assert ["note"] == [each.severity for each in judge(reports)]

    def test_a_wrong_result_names_its_rank(self):
        reports = change(healthy(4), 3, wrong=("gemm float32, seed 3: element 0 is 0x1",))
        assert [("wrong_result", (3,), ("n3",))] == found(reports)

    def test_a_wrong_sum_of_all_ranks_has_no_culprit(self):
        reports = healthy(4)
        for rank in range(4):
            reports = change(reports, rank, wrong=("all-reduce, seed 0: element 0 is 0x1",))
        assert [("wrong_result", (0, 1, 2, 3), ())] == found(reports)


class TestMissingGpus:
    def test_fewer_gpus_than_in_the_earlier_check_fail(self):
        baselines = {"n0": Baseline("H100", (), 8)}
        for reports in (healthy(7, per_node=8, gpu=True), healthy(2, per_node=2)):
            findings = found(reports, baselines=baselines)
            assert [("missing_gpu", ("n0",))] == [(kind, nodes) for kind, _, nodes in findings]
        assert [] == found(healthy(8, per_node=8, gpu=True), baselines=baselines)

    def test_a_first_check_fails_below_the_given_number(self):
        (finding,) = judge(healthy(2, per_node=2), num_gpus=8)
        assert ("missing_gpu", ("n0",)) == (finding.kind, finding.nodes)
        assert "n0 has 0 of 8 GPUs" in finding.text

    def test_a_node_without_gpus_among_others_is_named(self):
        reports = change(healthy(4, gpu=True, noise=0.02), 2, is_gpu=False, device="Xeon")
        assert [("missing_gpu", (2,), ("n2",))] == found(reports)

    def test_a_wrong_number_for_all_nodes_names_none(self):
        assert [("missing_gpu", ())] == [
            (kind, nodes) for kind, _, nodes in found(healthy(4, gpu=True), num_gpus=8)
        ]

    def test_a_rank_without_a_report_is_not_a_missing_gpu(self):
        reports = healthy(8, per_node=8, gpu=True)[:7]
        assert ["missing_rank"] == [each.kind for each in judge(reports, num_gpus=8)]


def test_nodes_with_another_number_of_ranks_are_not_compared():
    # Eight ranks share the memory and the disk of a node; two have more for each.
    reports = healthy(16, per_node=2)
    for rank in range(16, 24):
        more = msgspec.structs.replace(healthy(1)[0], rank=rank, node="n8")
        reports += scale([more], rank, 0.2, "memory_bytes_per_second", "disk_bytes_per_second")
    assert [] == found([msgspec.structs.replace(each, world_size=24) for each in reports])


@pytest.mark.parametrize("size", range(10))
def test_in_a_tournament_all_ranks_meet_once(size):
    met = []
    for turn in range(num_turns(size)):
        peers = [pair_of(rank, size, turn) for rank in range(size)]
        assert all(peer is None or rank == peers[peer] for rank, peer in enumerate(peers))
        met += [(rank, peer) for rank, peer in enumerate(peers) if peer is not None and rank < peer]
    assert [(a, b) for a in range(size) for b in range(a + 1, size)] == sorted(met)


def test_stages_end_with_done():
    assert len(STAGES) == DONE
