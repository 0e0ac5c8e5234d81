"""Creating, reading, changing, and deleting datasets with Google's client."""

import pytest
from google.api_core.exceptions import BadRequest, Conflict, NotFound, PreconditionFailed
from google.cloud import bigquery


def test_a_dataset_is_made_read_changed_and_removed(client: bigquery.Client) -> None:
    made = bigquery.Dataset(f"{client.project}.usage")
    made.description, made.labels, made.location = "what was used", {"team": "ml"}, "EU"
    client.create_dataset(made)
    dataset = client.get_dataset("usage")
    assert (dataset.description, dataset.labels, dataset.location) == (
        "what was used",
        {"team": "ml"},
        "EU",
    )
    dataset.description, dataset.labels = None, {"team": None, "cost": "low"}
    client.update_dataset(dataset, ["description", "labels"])
    changed = client.get_dataset("usage")
    assert (changed.description, changed.labels, changed.location) == (None, {"cost": "low"}, "EU")
    client.delete_dataset("usage")
    with pytest.raises(NotFound, match=f"Not found: Dataset {client.project}:usage"):
        client.get_dataset("usage")


def test_a_dataset_is_made_once(client: bigquery.Client, dataset: str) -> None:
    with pytest.raises(Conflict, match="Already Exists: Dataset"):
        client.create_dataset(dataset)
    assert client.create_dataset(dataset, exists_ok=True).dataset_id == dataset


def test_an_odd_name_is_refused(client: bigquery.Client) -> None:
    with pytest.raises(BadRequest, match="Invalid dataset ID"):
        client.create_dataset("with-dash")


def test_datasets_are_listed_in_pages(client: bigquery.Client) -> None:
    for number in range(5):
        client.create_dataset(f"d{number}")
    pages = [[item.dataset_id for item in page] for page in client.list_datasets(page_size=2).pages]
    assert pages == [["d0", "d1"], ["d2", "d3"], ["d4"]]


def test_a_dataset_with_tables_stays_unless_told(client: bigquery.Client, dataset: str) -> None:
    client.create_table(
        bigquery.Table(f"{client.project}.{dataset}.t", [bigquery.SchemaField("a", "STRING")])
    )
    with pytest.raises(BadRequest, match="still in use"):
        client.delete_dataset(dataset)
    client.delete_dataset(dataset, delete_contents=True)
    assert list(client.list_datasets()) == []


def test_a_change_of_something_changed_meanwhile_is_refused(
    client: bigquery.Client, dataset: str
) -> None:
    mine, theirs = client.get_dataset(dataset), client.get_dataset(dataset)
    theirs.description = "first"
    client.update_dataset(theirs, ["description"])
    mine.description = "second"
    with pytest.raises(PreconditionFailed):
        client.update_dataset(mine, ["description"])
    assert client.get_dataset(dataset).description == "first"


def test_two_projects_do_not_see_each_other(client: bigquery.Client, dataset: str) -> None:
    assert list(client.list_datasets(project="someone-else")) == []
    with pytest.raises(NotFound):
        client.get_dataset(f"someone-else.{dataset}")
    assert client.project in [
        project.project_id for project in client.list_projects(max_results=1_000)
    ]
