"""The tests of `make test`: the fast kinds without their costly tests, and of the slow kinds one
test of each main promise.

The rest runs in `make test-ci` and `make test-all`. Keep the sum of all under 16 minutes of
processor time: the gate should take ten minutes on two cores.
"""

from __future__ import annotations

QUICK = ("unit/", "property/", "component/")
"""The folders whose tests are in the gate unless they cost too much."""
COSTLY = (
    "component/test_adapter_export.py",
    "component/test_chart_rendering.py",
    "component/test_custom_code.py::test_code_of_a_model_folder_is_not_run",
    "component/test_data_memory.py",
    "component/test_leftovers.py",
    "component/test_model_export.py",
    "component/test_promtool.py",
    "component/test_rewards_trial.py",
    "component/test_rewards_services.py",
    "component/test_rewards_pool.py",
    "component/test_environments.py",
    "component/test_sharded_loading.py",
    "component/test_site.py",
    "component/test_wheel.py",
    "component/test_fork_server.py::test_fork_server_has_no_threads_or_open_files_after_imports",
    "property/test_codec.py::test_decoding_cost_of_any_accepted_schema_is_bounded",
    "property/test_media_logprobs.py",
    "property/test_routing_machine.py",
    "property/test_worker_machine.py::test_state_machine_detects_every_broken_mechanism",
    "property/test_worker_machine.py::test_guarantees_hold_under_random_interleavings_and_crashes[OverlapMachine]",
    "unit/algorithms/test_algorithms_learn.py",
    "unit/events/test_container.py::test_block_of_the_smallest_records_is_read",
    "unit/events/test_container.py::test_decompression_bomb_is_rejected_before_it_fills_the_memory",
    "unit/engines/test_engine_invariance.py",
    "integration/test_broadcast.py::test_engine_that_dies_or_hangs_in_a_broadcast_does_not_block_others[gloo-stop]",
    "integration/test_broadcast.py::test_engine_that_dies_or_hangs_in_a_broadcast_does_not_block_others[memory-stop]",
    "integration/test_embedded_broker.py::test_a_start_does_not_fail_when_the_class_archive_is_damaged",
    "e2e/test_bad_input.py::test_doctor_reports_all_problems_at_once_and_starts_no_process",
    "e2e/test_bad_input.py::test_resumed_run_rejects_another_model_before_a_worker_starts",
    "e2e/test_bad_input.py::test_run_whose_rewards_all_fail_ends_with_the_reasons",
    "unit/rewards/test_rewards_against_math_verify.py",
)
"""Files, or single tests, that the gate leaves out of what it takes otherwise."""
CHOSEN = (
    "engines/test_conformance.py",
    "integration/test_admin.py",
    "integration/test_broadcast.py",
    "integration/test_consumer_groups.py",
    "integration/test_control_following.py",
    "integration/test_dead_letters.py",
    "integration/test_embedded_broker.py",
    "integration/test_leases.py",
    "integration/test_sample_roles.py",
    "integration/test_step_commit.py",
    "integration/test_transactions.py",
    "e2e/test_bad_input.py",
    "fault/test_killed_broker.py::test_index_of_a_killed_worker_is_free_although_the_broker_died_too",
    "fault/test_killed_roles.py",
    "fault/test_large_things.py::test_oversize_record_is_rejected_by_the_broker",
)
"""Files, or single tests, of the slow kinds that are in the gate."""
SGLANG_FIXTURES = {"sglang_python", "server_url", "make_sglang"}


def is_in_gate(name: str) -> bool:
    """Return whether a test is in the gate, by its name below `tests`, with or without its
    parameters."""
    return (name.startswith(QUICK) or _is_one_of(CHOSEN, name)) and not _is_one_of(COSTLY, name)


def _is_one_of(listed: tuple[str, ...], name: str) -> bool:
    plain = name.partition("[")[0]
    return any(one in (plain, name) or plain.startswith(f"{one}::") for one in listed)
