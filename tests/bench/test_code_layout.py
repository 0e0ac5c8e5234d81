import ast

from bench.code_layout import PackageLayout, docstrings, homonyms, import_graphs, importers, layout


def test_layout_of_a_chain_and_a_cycle() -> None:
    chain = {"top": {"middle", "bottom"}, "middle": {"bottom"}, "bottom": set[str]()}
    assert layout(chain) == PackageLayout(members=3, layers=3, imports=3, cycles=0)
    cycle = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert layout(cycle) == PackageLayout(members=4, layers=2, imports=4, cycles=1)


def test_imports_count_in_every_package_they_cross() -> None:
    modules = {
        "api": "",
        "api.app": "from api.openai import embeddings\nimport shared.errors",
        "api.openai": "",
        "api.openai.embeddings": "from api.openai.images import draw\nimport api.openai.embeddings",
        "api.openai.images": "",
        "shared.errors": "",
    }
    graphs = import_graphs({name: ast.parse(source) for name, source in modules.items()})
    assert graphs["api"] == {"app": {"openai"}, "openai": set()}
    assert graphs["api.openai"] == {"embeddings": {"images"}, "images": set()}
    assert graphs["shared"] == {"errors": set()}


def test_homonyms_are_public_classes_of_one_name() -> None:
    modules = {"a": "class Waiter: ...\nclass _Own: ...", "b": "class Waiter: ...\nclass _Own: ..."}
    assert homonyms({name: ast.parse(source) for name, source in modules.items()}) == ["Waiter"]


def test_docstrings_of_fields_are_read_too() -> None:
    tree = ast.parse('"""One; two."""\nLIMIT = 1\n"""Three."""\nword = "four;"')
    assert docstrings([tree]) == "One; two.\nThree."


def test_importers_of_a_module_are_those_of_the_product() -> None:
    sources = {
        "api.a": "from api import b",
        "api.b": "import api.c",
        "api.c": "",
        "shared.d": "from api.c import X",
        "bench.e": "from api.b import Y",
    }
    found = importers({name: ast.parse(source) for name, source in sources.items()})
    assert found == {
        "api.a": set(),
        "api.b": {"api.a"},
        "api.c": {"api.b", "shared.d"},
        "shared.d": set(),
    }
