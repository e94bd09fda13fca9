"""Which files of a data set a card and the names of its files make of a split."""

import pytest

from mjax.data.hub_cards import choose


def files_of(files: str, card: str = "", config=None, split=None) -> list[str]:
    return choose(files.split(), card, config, split).files


def configs(*lines: str) -> str:
    return "---\nconfigs:\n" + "\n".join(lines) + "\n---\ntext"


@pytest.mark.parametrize(
    ("files", "split", "expected"),
    [
        ("a.txt b.jsonl c.bin", None, "a.txt b.jsonl"),
        ("train.csv test.csv", None, "train.csv"),
        ("train.csv test.csv", "test", "test.csv"),
        (
            "my-train-1.csv my-train-2.csv other.csv",
            None,
            "my-train-1.csv my-train-2.csv",
        ),
        ("contrain.csv latest.csv", None, "contrain.csv latest.csv"),
        (
            "dev/a.json dev/b.json training/a.json",
            "validation",
            "dev/a.json dev/b.json",
        ),
        ("test.jsonl.gz", None, "test.jsonl.gz"),
        (
            "data/web-00000-of-00002.parquet data/web-00001-of-00002.parquet x.txt",
            None,
            "data/web-00000-of-00002.parquet data/web-00001-of-00002.parquet",
        ),
        (
            "LICENSE.txt README.txt readme_fr.txt dataset_infos.json a.txt",
            None,
            "a.txt",
        ),
        ("a.parquet.gz a.parquet", None, "a.parquet"),
    ],
)
def test_without_a_card_the_names_of_files_decide(files, split, expected):
    assert files_of(files, split=split) == expected.split()


FILES = "en/train/a.json en/train/deep/b.json en/test.json fr/a.json fr/a.zip"


@pytest.mark.parametrize(
    ("lines", "config", "split", "expected"),
    [
        (['- data_files: "fr/*.json"'], None, None, "fr/a.json"),
        (
            ["- data_files: [fr/a.json, ./en/test.json]"],
            None,
            None,
            "en/test.json fr/a.json",
        ),
        (["- data_files: {test: en/test.json}"], None, "test", "en/test.json"),
        (["- data_files: {test: en/test.json}"], None, None, "en/test.json"),
        (
            ['- data_files: "en/**/*.json"'],
            None,
            None,
            "en/test.json en/train/a.json en/train/deep/b.json",
        ),
        (
            ['- data_files: "en/**"'],
            None,
            None,
            "en/test.json en/train/a.json en/train/deep/b.json",
        ),
        (
            ['- data_files: "en/train/"'],
            None,
            None,
            "en/train/a.json en/train/deep/b.json",
        ),
        (["- data_dir: en", '  data_files: "*/a.json"'], None, None, "en/train/a.json"),
        (["- data_dir: en"], None, None, "en/test.json"),
        (
            [
                "- config_name: a",
                "  data_dir: fr",
                "- config_name: b",
                "  data_dir: en",
            ],
            "b",
            "test",
            "en/test.json",
        ),
        (
            [
                "- config_name: a",
                "  data_dir: en",
                "- config_name: default",
                "  data_dir: fr",
            ],
            None,
            None,
            "fr/a.json",
        ),
    ],
)
def test_a_card_names_the_files(lines, config, split, expected):
    assert files_of(FILES, configs(*lines), config, split) == expected.split()


@pytest.mark.parametrize(
    ("card", "config", "split", "message"),
    [
        (
            configs("- config_name: a", "- config_name: b"),
            None,
            None,
            r"has 2 configurations \(a, b\); name one, as @REVISION:a",
        ),
        (configs("- config_name: a"), "b", None, "has no configuration 'b', but a"),
        (
            configs("- data_files: https://x.io/a.json"),
            None,
            None,
            "is not in the data set; download it",
        ),
        (
            configs("- data_files: 3"),
            None,
            None,
            "data_files of configuration 'default'",
        ),
        (
            configs("- data_files: none/*"),
            None,
            None,
            "has no file that is read, only none",
        ),
        (
            configs("- data_files: {a: fr/*, b: en/*}"),
            None,
            None,
            "has no split 'train', but a, b; name one, as @REVISION::a",
        ),
        ("---\nconfigs: [\n---\n", None, None, "the YAML of its card cannot be read"),
        (
            "---\nconfigs: 3\n---\n",
            None,
            None,
            "the YAML of its card cannot be read: configs must be",
        ),
        ("", "b", None, "its card names no configurations, so there is no 'b'"),
        ("", None, "tset", "has no split 'tset', but test; did you mean 'test'"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(card, config, split, message):
    with pytest.raises(ValueError, match=message):
        files_of(FILES, card, config, split)


def test_what_is_left_out_is_listed_with_texts_first():
    found = choose(
        ["LICENSE.txt", "a.bin", "train.txt", "test.txt", "README.md"], "", None, None
    )
    assert found.left_out == ["LICENSE.txt", "test.txt", "a.bin"]
