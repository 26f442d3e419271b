"""Which ranks share an agent, and what their node is called."""

from trainer_hooks.node import Spot, locate_process, name_nodes


def spot(host: str = "worker", memory: str = "boot:1:2", processes: str = "pid:[1]") -> Spot:
    return Spot(host, memory, processes)


def test_ranks_of_one_place_share_the_host_name():
    assert ["worker", "worker", "other"] == name_nodes([spot(), spot(), spot("other", "boot:9:9")])


def test_machines_of_one_name_are_told_apart_by_their_memory():
    here, there = spot(), spot(memory="other boot:1:2")
    first, second, third = name_nodes([here, there, here])
    assert first == third != second
    assert {"worker-"} == {name[:7] for name in (first, second)}


def test_a_name_does_not_depend_on_the_ranks_order_or_on_process_ids_where_memory_tells():
    here, there = spot(), spot(memory="other boot:1:2")
    again = [spot(memory="other boot:1:2", processes="pid:[7]"), spot(processes="pid:[8]")]
    assert name_nodes([here, there]) == name_nodes(again)[::-1]


def test_containers_that_share_memory_but_no_process_ids_are_two_nodes():
    first, second = name_nodes([spot(), spot(processes="pid:[2]")])
    assert first != second


def test_a_rank_without_a_folder_gives_nobody_another_name():
    assert ["worker", "worker"] == name_nodes([spot(), locate_process("worker", None)])


def test_a_spot_is_the_same_for_all_processes_here_and_another_for_another_folder(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "run").mkdir(parents=True)
    here = locate_process("worker", tmp_path / "a" / "run")
    assert locate_process("worker", tmp_path / "a" / "other run") == here
    assert locate_process("worker", tmp_path / "b" / "run") != here
    assert "" not in (here.memory, here.processes)
