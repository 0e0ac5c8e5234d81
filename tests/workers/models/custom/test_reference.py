"""Each row and paragraph of docs/reference/own-models.md names the tests that verify it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parents[3]
HERE = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reference" / "own-models.md"


class Block(NamedTuple):
    """A table row, or a paragraph, with its heading."""

    heading: str
    text: str


def read_blocks(page: str) -> list[Block]:
    """Returns a Markdown page's rows and paragraphs, without code, table headers, or links."""
    blocks, heading, lines = [], "", list[str]()
    for line in [*re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S).splitlines(), ""]:
        is_row = line.startswith("|")
        if lines and (not line or is_row or line.startswith(("#", "- "))):
            blocks.append(Block(heading, " ".join(lines)))
            lines = []
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif is_row:
            blocks.append(Block(heading, line.strip("| ")))
        elif line and not line.startswith("<a id"):
            lines.append(line.strip())
    return [one for at, one in enumerate(blocks) if not _is_head(blocks, at)]


def _is_head(blocks: list[Block], at: int) -> bool:
    """True if a block is a table's header row, or the line below it."""
    return any(set(one.text) <= set("|- ") for one in blocks[at : at + 2])


NO_PROMISE = ("",)
"""Used instead of tests when the text only introduces the blocks that follow."""
PROVEN_BY: dict[str, dict[str, tuple[str, ...]]] = {
    "Custom models": {
        "`task: custom` serves": ("test_cog_contract.py::test_the_version_is_pinned_and_named",),
        "`interface`": (
            "shared/test_catalog.py::test_interfaces_of_a_later_catalog_are_taken",
            "test_class_files.py::test_an_authors_schema_is_not_taken_for_an_interface",
        ),
        "`price.per_item_usd`": (
            "api/test_custom_charges.py::"
            "test_work_and_seconds_are_charged_alike_in_answer_counter_and_row",
        ),
        "`batch.max_items`": (
            "test_batches.py::test_a_batch_has_64_items_unless_the_entry_says_otherwise",
            "shared/test_catalog.py::"
            "test_a_class_computes_as_many_at_a_time_as_it_can_unless_the_entry_lowers_it",
            "api/test_custom_models.py::test_as_many_are_computed_at_a_time_as_the_class_allows",
        ),
        "`batch.key`": (
            "api/test_custom_batches.py::test_only_equal_values_of_the_key_share_a_batch",
            "test_batches.py::test_a_key_that_does_not_exist_is_refused",
        ),
        "`work.max`": ("test_weighing.py::test_an_entry_without_sane_bounds_is_refused",),
        "`work.max_s`": (
            "api/test_fair_classes.py::test_an_item_ends_at_the_longest_time_of_its_entry",
        ),
        "`batch.max_work`": (
            "test_weighing.py::test_a_batch_weighs_as_much_as_the_entry_says",
            "test_weighing.py::test_bounds_of_work_need_a_class_that_weighs",
        ),
        "`deterministic`": (
            "api/test_custom_charges.py::test_an_equal_result_costs_its_share_of_its_work",
            "api/test_custom_canary.py::test_outputs_of_a_canary_are_compared",
        ),
        "`api`": (
            "api/test_audio.py::test_an_entry_whose_class_can_not_serve_an_endpoint_is_refused",
            "api/test_audio.py::test_speech_is_a_file_of_its_format",
            "api/test_ocr.py::test_all_pages_with_their_price",
        ),
        "`environment`": (
            "test_variables.py::test_values_and_secrets_of_the_entry_reach_the_class",
            "test_variables.py::test_an_entry_that_is_wrong_is_refused_without_its_value",
        ),
        "`secrets`": ("test_variables.py::test_values_and_secrets_of_the_entry_reach_the_class",),
        "`processes`": (
            "infra/deploy/test_class_entries.py::"
            "test_the_worker_of_a_class_has_as_many_processes_as_its_entry_says",
            "infra/test_slow_setup.py::test_slow_endless_and_failing_setups_hold_up_nobody",
        ),
        "`startup_s`": (
            "test_rows.py::test_bounds_of_an_entry_are_those_of_the_page",
            "test_setup.py::test_a_later_setup_has_the_limit_of_its_entry",
        ),
        "`resources.disk_bytes`": (
            "test_rows.py::test_bounds_of_an_entry_are_those_of_the_page",
            "test_limits.py::test_half_of_the_room_is_of_what_was_free_at_first",
            "api/test_hostile_classes.py::test_each_ends_alone_in_a_clear_error",
        ),
        "`resources.memory_bytes`": (
            "test_limits.py::test_it_is_a_part_of_what_there_is",
            "api/test_hostile_classes.py::test_each_ends_alone_in_a_clear_error",
        ),
    },
    "The folder": {
        "The class `Runner` or `Predictor`, or": (
            "test_rows.py::test_a_class_is_found_without_cog_yaml",
            "test_forms.py::test_output_is_that_of_the_class",
            "test_forms.py::test_what_cog_yaml_asks_for_in_vain_is_named",
            "test_notes.py::test_notes_about_cog_yaml_come_before_the_class_fails",
            "test_notes.py::test_methods_of_the_author_are_left_alone",
            "test_notes.py::test_environments_in_the_folder_are_no_sources",
        ),
        "The class runs in a private copy": (
            "test_view.py::test_a_class_writes_beside_its_file_and_changes_nothing",
            "test_view.py::test_a_class_is_at_src_where_cog_has_it",
            "test_view.py::test_large_files_never_change",
            "test_view.py::test_links_in_a_circle_and_to_large_folders_stay_links",
            "test_view.py::test_without_namespaces_the_view_is_in_the_scratch_folder",
        ),
        "The API and the batch runner read": (
            "infra/test_reload.py::test_a_changed_class_is_reloaded_and_its_callers_wait",
            "infra/test_reloader.py::"
            "test_a_change_restarts_the_worker_and_has_the_catalog_read_again",
            "test_class_files.py::test_a_file_that_we_did_not_write_is_never_overwritten",
            "test_class_files.py::test_a_folder_that_an_earlier_release_checked_still_loads",
        ),
    },
    "Packages": {
        "A class with a `requirements.txt`": (
            "test_environments.py::test_two_classes_have_two_versions_and_nothing_of_ours",
            "test_rows.py::test_packages_of_cog_yaml_are_installed_as_uv_is_configured",
            "test_environments.py::test_a_class_without_requirements_runs_with_ours",
            "test_commands.py::test_python_is_that_of_the_class",
            "test_commands.py::test_scripts_of_its_packages_are_found",
            "test_environments.py::test_a_requirement_for_another_cog_has_no_effect",
        ),
        "`penstock models check`, `penstock up`": (
            "test_environments.py::test_it_is_made_once_for_equal_requirements_and_anew_for_others",
            "test_environments.py::test_two_at_once_make_it_once",
            "test_rows.py::test_packages_of_cog_yaml_are_installed_as_uv_is_configured",
            "test_environments.py::"
            "test_code_that_builds_a_package_sees_no_key_and_writes_nowhere_else",
        ),
        "In a worker's image": (
            "infra/deploy/test_images.py::test_worker_starts_as_in_the_manifests",
            "test_environments.py::test_a_machine_that_has_no_room_for_it_is_named",
        ),
        "An `overrides.txt`": (
            "test_environments.py::test_overrides_leave_out_what_a_package_asks_for",
        ),
        "`build.python_version`": (
            "test_environments.py::test_a_python_that_is_not_here_is_named",
            "test_forms.py::test_what_cog_yaml_asks_for_in_vain_is_named",
            "test_environments.py::test_what_can_t_be_installed_is_named",
        ),
    },
    "Setup": {
        "Each of a worker's processes calls `setup` once": (
            "test_setup.py::test_a_later_setup_has_the_limit_of_its_entry",
            "infra/test_slow_setup.py::test_slow_endless_and_failing_setups_hold_up_nobody",
            "infra/deploy/test_class_entries.py::test_probes_leave_a_class_the_time_of_its_entry",
            "test_setup.py::test_setup_is_shown_while_it_runs",
            "test_setup.py::test_output_of_setup_is_bounded",
        ),
        "A `setup` that raises an": (
            "infra/test_slow_setup.py::test_slow_endless_and_failing_setups_hold_up_nobody",
            "infra/test_supervision.py::"
            "test_worker_that_never_gets_ready_is_tried_after_longer_and_longer_pauses",
            "infra/test_supervision.py::test_worker_with_a_wrong_configuration_stays_down",
            "test_setup.py::test_only_what_may_be_mended_from_outside_is_tried_again",
            "test_setup.py::test_a_class_that_cant_be_set_up_again_is_tried_until_it_can",
            "test_setup.py::test_batches_wait_for_the_next_try_as_well",
            "infra/test_reload.py::test_a_class_that_can_t_be_set_up_waits_for_the_next_change",
        ),
    },
    "Processes": {
        "A worker has several processes": (
            "test_ports.py::test_check_suggests_one_process_until_the_entry_has_it",
            "infra/deploy/test_class_entries.py::"
            "test_a_worker_of_several_models_has_the_smallest_number",
            "infra/deploy/test_class_entries.py::"
            "test_the_worker_of_a_class_has_as_many_processes_as_its_entry_says",
            "infra/test_slow_setup.py::test_slow_endless_and_failing_setups_hold_up_nobody",
        ),
    },
    "Variables and secrets": {
        "Only the class's processes": (
            "test_variables.py::test_commands_give_a_class_what_its_entry_says",
            "test_variables.py::test_a_class_is_measured_with_its_variables",
            "test_variables.py::test_values_and_secrets_of_the_entry_reach_the_class",
            "test_variables.py::test_an_entry_that_is_wrong_is_refused_without_its_value",
            "test_rows.py::test_bounds_of_an_entry_are_those_of_the_page",
        ),
        "The catalog contains references": (
            "test_rows.py::test_variables_that_are_too_large_are_refused",
            "test_variables.py::test_secrets_are_in_nothing_that_is_shown",
            "test_variables.py::test_a_secret_in_two_pieces_is_found",
        ),
        "`google:projects": (
            "test_variables.py::test_versions_of_secret_manager",
            "infra/deploy/test_class_entries.py::"
            "test_the_worker_of_a_class_gets_its_secrets_and_no_other_does",
        ),
        "`kubernetes:SECRET": (
            "test_variables.py::test_a_secret_of_kubernetes_comes_by_the_variable_of_the_manifests",
            "infra/deploy/test_class_entries.py::test_the_chart_gives_the_secrets_as_well",
        ),
        "`local:/PATH`": (
            "test_variables.py::test_a_local_secret_may_be_readable_by_its_owner_only",
            "test_variables.py::test_a_secret_that_is_missing_is_named",
        ),
        "`PENSTOCK_CLASS_VARIABLES`": (
            "test_variables.py::test_the_operator_may_pass_proxies_and_certificates",
        ),
    },
    "Batches": {
        "A class can have `predict_batch`": (
            "test_batches.py::test_a_batch_has_an_output_for_each_input_in_order",
        ),
        "The element's fields": (
            "test_batches.py::test_the_fields_of_the_element_are_the_inputs",
            "api/test_custom_batches.py::test_the_queue_forms_batches",
            "api/test_custom_batches.py::test_only_equal_values_of_the_key_share_a_batch",
            "test_batches.py::test_equal_values_share_a_key_and_a_default_is_a_value",
            "test_batches.py::test_an_input_that_only_the_element_refuses_names_its_field",
            "test_batches.py::test_concurrency_does_not_go_with_batches",
            "test_batches.py::test_a_canceled_batch_is_stopped_and_the_next_one_computed",
        ),
        "an exception in place of an output": (
            "test_batches.py::test_an_exception_in_the_list_fails_its_item_alone_with_its_own_log",
        ),
        "an output of another type": (
            "test_batches.py::test_a_wrong_output_fails_its_item_alone",
            "test_batches.py::test_an_input_that_only_the_element_refuses_names_its_field",
        ),
        "`predict_batch` raises, exits": (
            "test_batches.py::test_what_breaks_a_batch_fails_alone",
            "test_batches.py::test_a_wrong_number_of_outputs_fails_with_its_reason",
            "test_batches.py::test_a_batch_whose_process_the_system_kills_is_to_be_tried_again",
            "workers/test_poison.py::"
            "test_neighbors_of_a_poison_job_finish_and_its_caller_gets_the_reason",
            "test_rows.py::test_a_batch_that_takes_too_long_is_killed_and_the_next_is_computed",
        ),
        "one caller cancels": (
            "workers/test_survival.py::test_running_batch_goes_on_for_those_who_want_it",
            "workers/test_deadlines.py::test_batch_stops_at_the_deadline_of_the_last_who_wants_it",
            "test_batches.py::test_a_canceled_batch_is_stopped_and_the_next_one_computed",
        ),
        "The items of a batch can belong": (
            "test_batches.py::test_what_one_alone_printed_and_recorded_is_its_own",
            "test_batches.py::test_an_exception_in_the_list_fails_its_item_alone_with_its_own_log",
        ),
    },
    "Several at a time": {
        "An asynchronous class": (
            "api/test_custom_models.py::test_as_many_are_computed_at_a_time_as_the_class_allows",
            "shared/test_catalog.py::"
            "test_a_class_computes_as_many_at_a_time_as_it_can_unless_the_entry_lowers_it",
            "test_public_text.py::test_check_prints_how_many_run_at_a_time_and_their_memory",
        ),
        "Each prediction has its own output": (
            "test_concurrent_prints.py::"
            "test_concurrent_predictions_have_their_own_lines_and_no_others",
            "test_concurrent_prints.py::"
            "test_a_task_that_outlives_its_prediction_prints_to_the_operators_log",
        ),
    },
    "Work": {
        "`def work(self, input) -> int`": (
            "test_weighing.py::test_an_item_weighs_what_the_class_says",
        ),
        "The worker calls `work` before": (
            "api/test_custom_charges.py::test_work_counts_toward_its_limit_by_the_minute",
            "test_weighing.py::test_a_loop_is_killed_and_others_are_weighed",
        ),
        "For each prediction, the API reserves": (
            "api/test_custom_charges.py::test_a_budget_reserves_the_most_work_and_the_longest_time",
            "test_weighing.py::test_a_wrong_weight_fails_its_item_alone",
            "api/test_custom_charges.py::test_what_fails_costs_nothing",
        ),
    },
    "Long items": {
        "A class without `predict_batch`": NO_PROMISE,
        "- **`work.max_s`**": (
            "api/test_fair_classes.py::test_an_item_ends_at_the_longest_time_of_its_entry",
        ),
        "- **The last free slot": (
            "api/test_fair_classes.py::test_a_tenant_does_not_hold_all_processes",
            "workers/test_tenant_shares.py::test_the_last_slot_is_free_for_others",
            "workers/test_tenant_shares.py::test_a_tenant_with_short_items_has_all_slots",
            "workers/test_tenant_shares.py::test_items_that_are_canceled_soon_make_no_tenant_quick",
            "workers/test_tenant_shares.py::test_a_long_item_is_remembered_for_an_hour",
        ),
        "With two or more processes, a": (
            "workers/test_tenant_shares.py::test_a_tenant_that_is_alone_has_all_slots",
            "workers/test_tenant_shares.py::test_one_process_is_for_everybody_in_turn",
        ),
    },
    "Price": {
        "A prediction that succeeded, or": (
            "api/test_custom_charges.py::"
            "test_work_and_seconds_are_charged_alike_in_answer_counter_and_row",
            "api/test_custom_charges.py::test_a_stream_that_was_read_in_part_costs_its_whole_work",
            "api/test_custom_models.py::"
            "test_what_was_read_of_a_stream_is_paid_though_it_is_canceled",
            "api/test_custom_charges.py::test_nobody_pays_for_the_set_up_after_anothers_crash",
            "api/test_custom_charges.py::test_nobody_pays_for_the_calls_that_another_made_fail",
            "api/test_custom_charges.py::test_an_equal_result_costs_its_share_of_its_work",
            "api/test_custom_charges.py::test_a_budget_reserves_the_most_work_and_the_longest_time",
        ),
    },
    "Canaries": {
        "A canary's outputs": (
            "api/test_custom_canary.py::test_outputs_of_a_canary_are_compared",
            "api/test_custom_canary.py::test_what_the_class_cant_compare_counts_as_nothing",
            "api/test_custom_canary.py::"
            "test_a_class_that_does_not_repeat_itself_is_not_compared_by_equality",
            "test_weighing.py::test_a_comparison_that_loops_is_killed",
        ),
    },
    "Inputs": {
        "All of Cog's types": (
            "test_forms.py::test_output_is_that_of_the_class",
            "api/test_custom_models.py::test_wrong_inputs_are_refused_by_the_api",
            "test_as_cog.py::test_values_that_a_type_does_not_list_are_refused",
            "test_forms.py::test_an_input_that_only_the_class_refuses_names_its_field",
            "test_rows.py::"
            "test_look_around_is_left_to_the_class_and_unknown_arguments_are_no_inputs",
        ),
        "A number reaches the class": (
            "test_as_cog.py::test_plain_values_and_defaults_reach_the_class_unchanged",
            "test_as_cog.py::test_unusual_inputs_are_passed_on",
            "api/test_large_json.py::test_large_inputs_reach_the_class_and_are_shown_as_links",
            "api/test_large_json.py::test_json_above_the_bounds_is_refused_with_them",
            "api/test_large_json.py::test_context_of_a_prediction_reaches_the_class",
        ),
        "A file can be a `data:`": (
            "api/test_custom_models.py::test_files_and_secrets_go_in_and_are_not_shown",
            "api/test_inputs_by_url.py::test_files_of_a_class_are_fetched_at_the_same_time_each_once",
        ),
    },
    "Inputs by URL": {
        "Files for custom classes, an image": (
            "api/test_inputs_by_url.py::test_an_image_is_fetched_for_an_edit",
            "api/test_inputs_by_url.py::test_an_image_is_fetched_for_openais_edits",
            "api/test_inputs_by_url.py::test_what_is_no_such_file_is_refused",
        ),
        "hosts": (
            "api/test_inputs_by_url.py::test_private_places_are_refused_by_field_and_reason",
            "api/test_inputs_by_url.py::test_an_operator_may_turn_it_off",
            "api/test_inputs_by_url.py::test_hosts_that_are_none_are_refused_at_the_start",
        ),
        "private networks": (
            "api/test_inputs_by_url.py::test_nobody_is_connected_to_who_was_not_checked",
            "api/test_inputs_by_url.py::test_a_certificate_must_be_of_the_name",
        ),
        "redirects": ("api/test_inputs_by_url.py::test_redirects_are_judged_as_urls_are",),
        "time": ("api/test_inputs_by_url.py::test_a_slow_body_is_cut",),
        "bytes": ("api/test_inputs_by_url.py::test_what_is_no_such_file_is_refused",),
        "type": ("api/test_inputs_by_url.py::test_what_is_no_such_file_is_refused",),
        "at a time": ("api/test_inputs_by_url.py::test_a_tenant_leaves_room_for_others",),
        "`penstock_api_fetched_inputs_total`": ("test_metric_names.py",),
        "A class sees the filename that": (
            "api/test_inputs_by_url.py::"
            "test_a_name_that_can_not_be_read_is_that_of_the_path_or_readable",
            "api/test_inputs_by_url.py::test_a_repeated_request_loads_nothing_twice",
            "api/test_inputs_by_url.py::test_requests_at_the_same_time_share_a_download",
        ),
    },
    "Outputs": {
        "plain values, `dict`": (
            "test_as_cog.py::test_outputs_pass_whatever_the_class_declares",
            "test_forms.py::test_an_error_ends_its_prediction_and_not_the_model",
            "test_rows.py::test_a_piece_and_the_files_of_an_output_have_bounds",
        ),
        "`Path` or an open file": (
            "api/test_custom_models.py::test_files_come_as_links_or_inline_when_small",
            "test_forms.py::test_files_go_in_and_out_in_lists_and_objects",
            "test_rows.py::test_a_piece_and_the_files_of_an_output_have_bounds",
            "api/test_hostile_classes.py::test_each_ends_alone_in_a_clear_error",
        ),
        "`Iterator[...]`": (
            "api/test_custom_models.py::test_elements_are_streamed_and_resumed",
            "test_output_types.py::test_generators_are_streamed_whatever_they_declare",
        ),
        "`ConcatenateIterator[str]`": ("test_forms.py::test_output_is_that_of_the_class",),
        "`Iterator[Path]`": (
            "api/test_custom_models.py::test_files_are_streamed_as_they_are_made",
        ),
        "As with Cog, the value matters": (
            "test_as_cog.py::test_outputs_pass_whatever_the_class_declares",
            "test_as_cog.py::test_outputs_that_json_cannot_carry_fail_with_their_place",
            "test_output_types.py::test_schema_says_what_is_known_of_a_type",
        ),
        "Each file is read as soon as it": ("test_forms.py::test_files_are_pieces_of_a_stream",),
        "While an iterator runs": (
            "api/test_partial_output.py::test_output_grows_in_get_while_the_class_yields",
            "api/test_partial_output.py::test_a_webhook_is_notified_of_growth_and_once_of_the_end",
            "api/test_partial_output.py::test_what_get_has_shown_is_charged_if_it_is_canceled",
            "workers/functions/test_webhook.py::test_output_is_told_of_twice_a_second_at_most",
        ),
        "If the class fails, `output` keeps": (
            "api/test_partial_output.py::test_output_before_a_failure_stays_and_costs_nothing",
            "api/test_partial_output.py::test_files_before_a_failure_stay_until_it_is_deleted",
        ),
        "Output JSON larger than 1": (
            "api/test_large_json.py::test_a_large_output_is_in_the_prediction",
            "api/test_large_json.py::test_an_answer_that_waited_has_a_large_output",
        ),
        "a text for `-> Path`": ("test_rows.py::test_a_text_that_names_a_file_becomes_it",),
        "in the stream of a `ConcatenateIterator`": (
            "test_as_cog.py::test_pieces_of_a_concatenation_stay_as_they_are",
        ),
        "a `Secret` in an output": (
            "test_rows.py::test_secrets_are_no_outputs_and_dates_and_booleans_of_numpy_are",
        ),
        "integers over 64 bits": (
            "test_forms.py::test_an_error_ends_its_prediction_and_not_the_model",
        ),
        "numpy's booleans and dates": (
            "test_rows.py::test_secrets_are_no_outputs_and_dates_and_booleans_of_numpy_are",
        ),
        "Each event has an ID": (
            "api/test_custom_models.py::test_readers_go_on_behind_each_element_of_a_burst",
            "faults/test_custom_streams.py::test_each_stream_is_whole_or_says_why_while_parts_die",
            "test_streamed_pieces.py::test_pieces_that_were_streamed_before_are_not_streamed_again",
        ),
        "`logs` contains the last 32 Ki": (
            "test_forms.py::test_much_output_is_cut_at_its_begin",
            "test_concurrent_prints.py::test_each_of_two_has_its_lines_whenever_the_other_joins",
            "test_concurrent_prints.py::"
            "test_concurrent_predictions_have_their_own_lines_and_no_others",
            "api/test_custom_models.py::test_what_a_class_prints_is_shown_while_it_runs",
            "test_forms.py::test_metrics_and_what_was_printed",
        ),
        "[Batches](batches.md)": (
            "api/batches/test_lines_of_classes.py::"
            "test_lines_are_answered_and_their_jobs_are_of_the_batch",
            "api/test_custom_charges.py::"
            "test_lines_of_batches_are_charged_alike_in_answer_counter_and_row",
        ),
    },
    "Compared with Cog's own server": {
        "The command runs each class": (
            "cog_comparison/test_comparison.py::test_a_class_is_compared_with_cogs_own_server",
            "cog_comparison/test_comparison.py::test_inputs_are_made_up_if_no_command_names_them",
            "cog_comparison/test_comparison.py::test_fixtures_that_cannot_run_here_have_a_reason",
        ),
        "These differences are intended": NO_PROMISE,
        "a canceled prediction keeps all": (
            "api/test_partial_output.py::test_what_get_has_shown_is_charged_if_it_is_canceled",
        ),
        "an asynchronous iterator that fails": (
            "api/test_partial_output.py::test_output_of_an_asynchronous_class_stays_when_it_fails",
        ),
        "null for an input with": (
            "api/test_custom_models.py::test_null_is_the_same_as_leaving_an_input_out",
        ),
        "a file in an object": ("test_rows.py::test_a_file_in_an_object_keeps_its_name",),
        "a lone surrogate": (
            "api/test_large_json.py::test_values_that_json_cannot_carry_are_refused",
            "test_as_cog.py::test_outputs_that_json_cannot_carry_fail_with_their_place",
        ),
        "without a built schema": (
            "test_forms.py::test_output_is_that_of_the_class",
            "test_forms.py::test_a_folder_that_cant_be_served_says_why",
            "api/test_custom_models.py::test_wrong_inputs_are_refused_by_the_api",
        ),
        "a string as the default of a `Path`": (
            "test_rows.py::test_defaults_have_the_types_of_values_that_callers_give",
        ),
        "an `Enum` member": (
            "test_rows.py::test_defaults_have_the_types_of_values_that_callers_give",
        ),
        "`COG_SETUP_TIMEOUT`": (
            "test_rows.py::test_a_setup_timeout_for_cogs_server_has_no_effect",
        ),
        "`healthcheck()` determines": ("test_notes.py::test_methods_of_the_author_are_left_alone",),
        "parts of a line that several": (
            "test_concurrent_prints.py::test_parts_of_lines_are_not_mixed_as_by_cog",
        ),
    },
    "How long it takes": {
        "The command runs the class": (
            "test_measuring.py::test_the_command_writes_the_file_that_the_plan_reads",
        ),
        "`setup_s`": ("test_measuring.py::test_setup_items_memory_and_bytes_are_measured",),
        "`batches`": (
            "test_measuring.py::test_what_a_class_computes_together_is_measured_together",
            "test_measuring.py::test_batches_of_a_class_are_measured",
        ),
        "`work_per_item`": ("test_measuring.py::test_work_of_inputs_is_measured",),
        "`peak_memory_bytes`": (
            "test_measuring.py::test_setup_items_memory_and_bytes_are_measured",
        ),
        "`input_bytes`": ("test_measuring.py::test_setup_items_memory_and_bytes_are_measured",),
        "`device`": ("test_measuring.py::test_setup_items_memory_and_bytes_are_measured",),
        "`sources_sha256`": (
            "../tools/planning/tests/deploy/test_measurements.py::"
            "test_figures_of_something_else_are_refused",
        ),
        "After a warm-up, each input": (
            "test_measuring.py::test_setup_items_memory_and_bytes_are_measured",
        ),
    },
    "When it fails": {
        "raises |": (
            "api/test_custom_models.py::test_errors_of_a_class_end_its_predictions_alone",
        ),
        "raises an exception": (
            "api/test_custom_models.py::"
            "test_an_input_that_the_class_calls_invalid_is_no_failure_of_the_service",
            "api/test_audio.py::test_errors_of_a_class_name_the_fields_of_the_form",
        ),
        "returns something that JSON can't represent": (
            "test_as_cog.py::test_outputs_that_json_cannot_carry_fail_with_their_place",
        ),
        "exits (`os._exit`) or crashes": (
            "api/test_hostile_classes.py::test_each_ends_alone_in_a_clear_error",
            "test_apart.py::test_a_death_is_noticed_though_a_child_has_its_connection",
        ),
        "uses more than `resources.memory_bytes`": (
            "api/test_hostile_classes.py::test_each_ends_alone_in_a_clear_error",
            "test_hostile_models.py::test_processes_are_bounded",
        ),
        "has more on disk": (
            "api/test_hostile_classes.py::test_each_ends_alone_in_a_clear_error",
            "test_limits.py::test_files_are_bounded_by_their_number",
        ),
        "writes a file larger": (
            "api/test_hostile_classes.py::test_each_ends_alone_in_a_clear_error",
        ),
        "closes its connection": (
            "api/test_hostile_classes.py::test_each_ends_alone_in_a_clear_error",
        ),
        "is killed by the system": (
            "api/test_custom_models.py::"
            "test_a_caller_never_reads_what_a_process_printed_before_it_died",
        ),
        "loops": (
            "api/test_custom_models.py::test_a_loop_ends_at_its_deadline",
            "api/test_custom_models.py::test_a_loop_ends_when_it_is_canceled",
            "test_forms.py::test_a_cancellation_raises_cogs_exception",
            "test_forms.py::test_a_loop_is_killed_and_others_are_served",
        ),
        "raises in `setup`": (
            "test_forms.py::test_setup_that_raises_refuses_with_its_traceback",
            "infra/test_slow_setup.py::test_slow_endless_and_failing_setups_hold_up_nobody",
        ),
        "**Invalid inputs.**": (
            "test_public_text.py::test_a_class_blames_the_input_without_an_import",
            "test_forms.py::test_an_exception_with_a_field_calls_that_input_wrong",
        ),
        "The prediction fails with `invalid_input`": (
            "api/test_custom_models.py::"
            "test_an_input_that_the_class_calls_invalid_is_no_failure_of_the_service",
            "api/test_ocr.py::test_what_a_class_finds_wrong_is_about_the_document",
            "test_weighing.py::test_work_may_call_an_input_wrong",
            "test_public_text.py::test_a_batch_of_one_blames_its_input",
        ),
        "**Paths.**": (
            "test_public_text.py::test_errors_and_logs_name_no_path_of_the_machine",
            "test_public_text.py::test_only_whole_folders_are_removed",
            "test_public_text.py::test_the_author_can_keep_tracebacks_from_callers",
        ),
        "If several predictions were": (
            "api/test_hostile_classes.py::"
            "test_of_several_at_a_time_the_one_that_ends_the_process_fails_alone",
        ),
    },
    "What it can reach": {
        "The class's process can't see": (
            "test_forms.py::test_the_class_sees_no_key_and_no_process_of_ours",
            "test_confinement.py::test_a_user_without_rights_is_confined_as_well",
        ),
        "It writes only under its scratch folder": (
            "api/test_hostile_classes.py::test_each_ends_alone_in_a_clear_error",
            "test_confinement.py::test_files_are_moved_between_folders_as_caches_do",
        ),
        "It can't read the environment": (
            "api/test_hostile_classes.py::test_each_ends_alone_in_a_clear_error",
            "test_confinement.py::test_a_process_of_the_same_user_cant_read_the_environment",
            "test_apart.py::test_an_output_is_read_as_the_class_sees_it",
        ),
        "It can't kill other processes": (
            "api/test_hostile_classes.py::test_each_ends_alone_in_a_clear_error",
        ),
        "`/tmp` is private": (
            "test_confinement.py::test_a_class_below_tmp_has_what_its_links_lead_to",
            "test_view.py::test_a_class_is_at_src_where_cog_has_it",
            "test_scratch.py::test_what_a_killed_process_left_is_removed_by_the_next",
        ),
        "Any processes that it starts": (
            "api/test_hostile_classes.py::test_what_a_class_left_behind_ends_with_it",
            "test_apart.py::test_a_process_ends_with_its_worker",
        ),
        "It can't connect to the TCP ports": (
            "test_services.py::test_ports_are_those_of_the_settings",
            "test_services.py::test_a_class_reaches_other_ports_only",
        ),
        "The disk limit counts": (
            "test_limits.py::test_files_on_disk_are_counted_once_and_without_holes",
            "test_limits.py::test_a_file_counts_that_was_removed_and_is_open",
            "test_hostile_models.py::test_files_that_predictions_left_are_removed_between_two",
            "test_hostile_models.py::test_disk_is_bounded_without_a_namespace_of_mounts",
            "test_wrappers.py::test_a_wrapper_works_as_it_is",
            "test_confinement.py::test_a_class_below_tmp_has_what_its_links_lead_to",
        ),
        "A worker logs the features": ("test_rows.py::test_a_worker_says_what_its_system_lacks",),
    },
}


def path_of(node: str) -> Path:
    """A test's file: in this folder unless a different one is named."""
    file = node.partition("::")[0]
    return HERE / file if "/" not in file and (HERE / file).exists() else TESTS / file


@cache
def functions_of(path: Path) -> frozenset[str]:
    """Returns the names of the functions in a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, kinds))


@pytest.mark.parametrize("block", read_blocks(PAGE.read_text()), ids=lambda one: one.text[:40])
def test_each_row_and_paragraph_names_its_tests(block: Block) -> None:
    named = PROVEN_BY.get(block.heading, {})
    tests = [one for begin, one in named.items() if block.text.startswith(begin)]
    assert any(tests), f"PROVEN_BY[{block.heading!r}] names no test of {block.text!r}"


def test_each_name_is_of_a_row_and_each_test_exists() -> None:
    blocks = read_blocks(PAGE.read_text())
    for heading, named in PROVEN_BY.items():
        for begin, tests in named.items():
            texts = [one.text for one in blocks if one.heading == heading]
            assert any(text.startswith(begin) for text in texts), f"{begin} is not below {heading}"
            for test in tests if tests != NO_PROMISE else ():
                path, _, name = path_of(test), *test.partition("::")[1:]
                assert path.exists(), test
                assert not name or name in functions_of(path), test


def test_a_row_without_a_test_is_found() -> None:
    page = "# Title\n\nText\n\n| a | b |\n|---|---|\n| `new` | row |\n\n```\n| no | row |\n```\n"
    assert read_blocks(page) == [Block("Title", "Text"), Block("Title", "`new` | row")]
