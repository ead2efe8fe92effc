"""TensorStore reads every database we write, and we read every database it writes."""

import uuid
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from tailrace.format import ocdbt
from tailrace.format.ocdbt import DataFile, Indirect

VALUES = DataFile(b"", b"d/" + uuid.UUID(int=1).hex.encode())
NODES = DataFile(b"", b"d/" + uuid.UUID(int=2).hex.encode())
UUID = uuid.UUID(int=3).bytes


def tensorstore_open(directory: Path, *, context: ts.Context | None = None, **config: object) -> ts.KvStore:
    """The database as TensorStore opens it, with a cache of its own unless a context is given."""
    spec = {"driver": "ocdbt", "base": directory.as_uri() + "/", **({"config": config} if config else {})}
    return ts.KvStore.open(spec, context=context or ts.Context()).result()


def tensorstore_read(directory: Path) -> dict[bytes, bytes]:
    """Every key and value, by TensorStore."""
    store = tensorstore_open(directory)
    return {key: store.read(key).result().value for key in store.list().result()}


def read_range(directory: Path, place: Indirect) -> bytes:
    """The bytes of a range of a data file."""
    with open(directory / place.file.path, "rb") as file:
        file.seek(place.offset)
        return file.read(place.length)


def read_manifest(directory: Path) -> ocdbt.Manifest:
    """The manifest that holds the newest version."""
    manifest = ocdbt.decode_manifest((directory / "manifest.ocdbt").read_bytes())
    if manifest.config.kind == "numbered":
        name = ocdbt.newest_numbered_manifest(path.name for path in directory.iterdir())
        manifest = ocdbt.decode_manifest((directory / name).read_bytes())
    return manifest


def read_all(directory: Path) -> dict[bytes, bytes]:
    """Every key and value, by our decoder, in the order of the tree."""
    root = read_manifest(directory).newest.root
    pending = [] if root is None else [(root.node, root.height, b"")]
    found: dict[bytes, bytes] = {}
    while pending:
        place, height, prefix = pending.pop()
        node = ocdbt.decode_node(read_range(directory, place), height=height, base=place.file.base, prefix=prefix)
        if isinstance(node, ocdbt.LeafNode):
            found |= {k: v if isinstance(v, bytes) else read_range(directory, v) for k, v in node.items()}
        else:
            pending.extend((child.node, height - 1, child.prefix) for child in reversed(node.children))
    return found


def write_database(directory: Path, content: dict[bytes, bytes], *, entries_per_node: int = 512, inline: int = 1024):
    """A database of ours; values above `inline` bytes are indirect."""
    (directory / "d").mkdir(parents=True)
    entries: list[ocdbt.Entry] = []
    with open(directory / VALUES.path, "wb") as values, open(directory / NODES.path, "wb") as nodes:
        for key, value in sorted(content.items()):
            entries.append((key, value if len(value) <= inline else Indirect(VALUES, values.tell(), len(value))))
            if len(value) > inline:
                values.write(value)

        def append(node: bytes) -> int:
            offset = nodes.tell()
            nodes.write(node)
            return offset

        root = ocdbt.write_tree(entries, append, NODES, entries_per_node=entries_per_node)
    manifest = ocdbt.encode_manifest(root, uuid=UUID, commit_time_ns=1_700_000_000_000_000_000)
    (directory / "manifest.ocdbt").write_bytes(manifest)
    return root


def sample(count: int, seed: int = 0) -> dict[bytes, bytes]:
    """Keys as zarr3 gives them, values from none to some thousand random bytes."""
    random = np.random.default_rng(seed)
    keys = [f"params.layer_{i // 3}.{'scale' if i % 3 else 'kernel'}/c/{i % 3}/0".encode() for i in range(count)]
    return {key: random.bytes(int(size)) for key, size in zip(keys, random.integers(0, 3000, count), strict=True)}


# TensorStore reads ours


@pytest.mark.parametrize(("count", "height"), [(1, 0), (4, 0), (5, 1), (16, 1), (17, 2), (60, 2), (65, 3), (300, 4)])
def test_tensorstore_reads_trees_of_every_height(tmp_path, count, height):
    """TensorStore lists and reads every key, inline and indirect, of trees of heights 0 to 4."""
    content = sample(count)

    root = write_database(tmp_path / "db", content, entries_per_node=4)

    assert root.height == height
    assert tensorstore_read(tmp_path / "db") == content
    assert read_all(tmp_path / "db") == content


@pytest.mark.parametrize("inline", [0, 1024, 1 << 20])
def test_tensorstore_reads_inline_and_indirect_values(tmp_path, inline):
    """Values may all be inline, all indirect, or some of each; the empty value too."""
    content = sample(1200) | {b"empty": b"", b"large": bytes(700_000)}

    write_database(tmp_path / "db", content, inline=inline)

    assert tensorstore_read(tmp_path / "db") == content


def test_tensorstore_reads_keys_of_any_bytes(tmp_path):
    """Keys that are prefixes of others, not UTF-8, empty, or as long as the format allows."""
    content = dict.fromkeys((b"", b"\x00", b"a", b"a/", b"aa", b"\xff\xfe", b"x" * 65535, b"x" * 65534 + b"y"), b"v")

    write_database(tmp_path / "db", content, entries_per_node=2)

    assert tensorstore_read(tmp_path / "db") == content


def test_tensorstore_reads_an_empty_database(tmp_path):
    """A database without keys is one, and can be written to."""
    write_database(tmp_path / "db", {})

    assert tensorstore_read(tmp_path / "db") == {}
    tensorstore_open(tmp_path / "db").write(b"a", b"1").result()
    assert read_all(tmp_path / "db") == {b"a": b"1"}


def test_tensorstore_agrees_with_our_configuration(tmp_path):
    """TensorStore opens our database with the configuration we believe to have written."""
    write_database(tmp_path / "db", sample(3))

    tensorstore_open(
        tmp_path / "db",
        uuid=UUID.hex(),
        manifest_kind="single",
        max_inline_value_bytes=1024,
        max_decoded_node_bytes=8 << 20,
        version_tree_arity_log2=4,
        compression={"id": "zstd", "level": 1},
    )


# We read TensorStore's


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="default"),
        pytest.param({"compression": None}, id="uncompressed"),
        pytest.param({"manifest_kind": "numbered"}, id="numbered"),
        pytest.param({"max_decoded_node_bytes": 500}, id="tall"),
        pytest.param({"max_decoded_node_bytes": 1, "compression": None}, id="tallest"),
        pytest.param({"max_inline_value_bytes": 1 << 20}, id="inlined"),
        pytest.param({"max_inline_value_bytes": 0}, id="indirect"),
        pytest.param({"max_decoded_node_bytes": 100_000_000, "max_inline_value_bytes": 1024}, id="as Orbax"),
        pytest.param({"version_tree_arity_log2": 1}, id="many version nodes"),
    ],
)
def test_we_read_every_variant(tmp_path, config):
    """Whatever its configuration, after several commits and deletions, a database of TensorStore is ours to read."""
    content = sample(200)
    store = tensorstore_open(tmp_path / "db", **config)
    for start in range(0, 200, 50):
        with ts.Transaction() as transaction:
            for key in list(content)[start : start + 50]:
                store.with_transaction(transaction)[key] = content[key]
    for key in list(content)[::7]:
        store.write(key, None).result()
        del content[key]

    assert read_all(tmp_path / "db") == content == tensorstore_read(tmp_path / "db")


def test_keys_come_in_order(tmp_path):
    """A tall tree of TensorStore's, whose nodes leave out prefixes, is walked in key order."""
    store = tensorstore_open(tmp_path / "db", max_decoded_node_bytes=300)
    content = sample(100)
    for key, value in content.items():
        store.write(key, value[:50]).result()

    assert read_manifest(tmp_path / "db").newest.root.height >= 2
    assert list(read_all(tmp_path / "db")) == sorted(content)


def test_statistics_are_those_of_tensorstore(tmp_path):
    """For one tree, our totals are TensorStore's: keys, and the bytes of indirect values."""
    content = sample(100)
    ours = write_database(tmp_path / "ours", content)
    store = tensorstore_open(tmp_path / "theirs", max_inline_value_bytes=1024)
    with ts.Transaction() as transaction:
        for key, value in content.items():
            store.with_transaction(transaction)[key] = value

    theirs = read_manifest(tmp_path / "theirs").newest.root

    assert ours.statistics._replace(tree_bytes=0) == theirs.statistics._replace(tree_bytes=0)
    assert theirs.statistics.tree_bytes == theirs.node.length


def test_an_emptied_database_has_no_root(tmp_path):
    """Where TensorStore deleted the last key there is a version, and no root."""
    store = tensorstore_open(tmp_path / "db")
    store.write(b"a", b"1").result()
    store.write(b"a", None).result()

    newest = read_manifest(tmp_path / "db").newest

    assert newest.root is None
    assert newest.generation == 3


# Both on one database


@pytest.mark.parametrize("entries_per_node", [2, 3, 512])
def test_tensorstore_writes_on_top_of_ours(tmp_path, entries_per_node):
    """TensorStore adds, replaces and deletes keys of our database, and we read the result."""
    content = sample(50)
    write_database(tmp_path / "db", content, entries_per_node=entries_per_node)
    store = tensorstore_open(tmp_path / "db")
    changes = dict.fromkeys(list(content)[::5], b"replaced") | {b"added/%d" % i: bytes(2000) for i in range(20)}
    for key, value in changes.items():
        store.write(key, value).result()
    store.delete_range(ts.KvStore.KeyRange(b"params.layer_1", b"params.layer_2")).result()

    expected = {k: v for k, v in (content | changes).items() if not b"params.layer_1" <= k < b"params.layer_2"}

    assert read_all(tmp_path / "db") == expected == tensorstore_read(tmp_path / "db")


def process_databases(root: Path, writer) -> dict[bytes, bytes]:
    """Databases of two processes below `root`, as Orbax lays them out, and all they hold."""
    everything: dict[bytes, bytes] = {}
    for process in range(2):
        content = {b"p%d." % process + key: value for key, value in sample(90, seed=process).items()}
        writer(root / f"ocdbt.process_{process}", content)
        everything |= content
    return everything


def merge(root: Path, processes: int = 2) -> None:
    """Copy the databases of the processes into that of `root` by reference, as Orbax does."""
    context = ts.Context()  # one for all: only then TensorStore sees that the files are below one directory
    target = tensorstore_open(root, context=context)
    with ts.Transaction(atomic=True) as transaction:
        for process in range(processes):
            source = tensorstore_open(root / f"ocdbt.process_{process}", context=context)
            source.experimental_copy_range_to(target.with_transaction(transaction)).result()


def tensorstore_write(directory: Path, content: dict[bytes, bytes]) -> None:
    """A database of TensorStore's, of small nodes."""
    store = tensorstore_open(directory, max_decoded_node_bytes=600)
    with ts.Transaction() as transaction:
        for key, value in content.items():
            store.with_transaction(transaction)[key] = value


def small_nodes(directory: Path, content: dict[bytes, bytes]) -> None:
    """A database of ours, of small nodes."""
    write_database(directory, content, entries_per_node=5)


@pytest.mark.parametrize("writer", [tensorstore_write, small_nodes])
def test_merged_process_databases(tmp_path, writer):
    """Databases merged by TensorStore's copy_range, its own and ours, are read through their base paths."""
    content = process_databases(tmp_path, writer)

    merge(tmp_path)

    assert read_all(tmp_path) == content == tensorstore_read(tmp_path)


def test_merged_merges(tmp_path):
    """A merge of merges names its values through both directories."""
    content = process_databases(tmp_path / "ocdbt.process_0", tensorstore_write)
    merge(tmp_path / "ocdbt.process_0")

    merge(tmp_path, processes=1)

    assert read_all(tmp_path) == content == tensorstore_read(tmp_path)


def refer(root: Path, processes: int = 2) -> None:
    """A database in `root` whose only node refers to the trees of the processes, all of one height."""
    children = []
    for process in range(processes):
        base = b"ocdbt.process_%d/" % process
        tree = read_manifest(root / base.decode()).newest.root
        place = tree.node._replace(file=DataFile(base + tree.node.file.base, tree.node.file.relative))
        children.append(ocdbt.Child(b"p%d." % process, place, tree.statistics))
    node = ocdbt.encode_interior_node(tree.height + 1, children)
    (root / "d").mkdir(exist_ok=True)
    (root / NODES.path).write_bytes(node)
    totals = ocdbt.Statistics(*map(sum, zip(*(child.statistics for child in children), strict=True)))
    merged = ocdbt.Root(Indirect(NODES, 0, len(node)), tree.height + 1, totals)
    (root / "manifest.ocdbt").write_bytes(ocdbt.encode_manifest(merged, uuid=UUID, commit_time_ns=1))


@pytest.mark.parametrize("writer", [tensorstore_write, small_nodes])
def test_nodes_inherit_the_base_of_their_file(tmp_path, writer):
    """Where a node of ours refers to whole trees of process databases, TensorStore finds their files as we do."""
    content = process_databases(tmp_path, writer)

    refer(tmp_path)

    assert read_all(tmp_path) == content == tensorstore_read(tmp_path)


def test_bases_nest(tmp_path):
    """Trees referred to from trees that are referred to are found through both directories."""
    content = process_databases(tmp_path / "ocdbt.process_0", small_nodes)
    refer(tmp_path / "ocdbt.process_0")

    refer(tmp_path, processes=1)

    assert read_all(tmp_path) == content == tensorstore_read(tmp_path)


def test_tensorstore_reads_our_index_over_process_files(tmp_path):
    """One index of ours may name values in files of several processes."""
    files = [DataFile(b"", f"ocdbt.process_{i}/d/{uuid.UUID(int=i).hex}".encode()) for i in range(12)]
    for i, file in enumerate(files):
        (tmp_path / file.path).parent.mkdir(parents=True)
        (tmp_path / file.path).write_bytes(b"head" + b"%d" % i * 50)
    entries = [(b"k%02d" % i, Indirect(file, 4, 10)) for i, file in enumerate(files)]
    (tmp_path / "d").mkdir()
    nodes = bytearray()

    def append(node: bytes) -> int:
        nodes.extend(node)
        return len(nodes) - len(node)

    root = ocdbt.write_tree(entries, append, NODES, entries_per_node=5)
    (tmp_path / NODES.path).write_bytes(nodes)
    (tmp_path / "manifest.ocdbt").write_bytes(ocdbt.encode_manifest(root, uuid=UUID, commit_time_ns=1))

    assert tensorstore_read(tmp_path) == {b"k%02d" % i: (b"%d" % i * 50)[:10] for i in range(12)}
