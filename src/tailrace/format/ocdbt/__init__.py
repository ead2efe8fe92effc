"""OCDBT, the key-value database inside an Orbax checkpoint: bytes <-> frozen nouns, no I/O.

Source of the layout: TensorStore's description of its `ocdbt` driver (github.com/google/tensorstore,
`tensorstore/kvstore/ocdbt/index.rst`, and the codecs in `format/` beside it). Integers are varints unless said.

    manifest, B+tree node   magic u32 BE | length u64 LE of all | version 0 | compression 0 none, 1 zstd
                            | body | crc32c u32 LE of all before it                                         envelope.py
    manifest body           uuid 16 bytes | kind 0 single, 1 numbered | max inline value bytes
                            | max decoded node bytes | version tree arity log2 u8
                            | compression 0, or 1 and its level i32 LE; kind 1 ends here                     manifest.py
                            | data file table | versions | older version nodes
    versions (columns)      count | generations | root heights u8 | file ids | offsets | lengths
                            | keys | tree bytes | indirect value bytes | commit times u64 LE ns
                            an empty tree has offset and length 2**64 - 1
    data file table         count | prefix lengths (count - 1) | suffix lengths | base path lengths
                            | path suffixes                                                                  files.py
    node body               height u8 | data file table | count | key prefix lengths (count - 1)
                            | key suffix lengths | interior: subtree prefix lengths | key suffixes           nodes.py
      leaf, height 0        | value lengths | value kinds u8: 0 inline, 1 indirect
                            | file ids and offsets of the indirect ones | inline values
      interior              | file ids | offsets | lengths | keys | tree bytes | indirect value bytes

A value, like a node, is any byte range of any data file. A data file's path is base + relative; nodes read from
it inherit the base in front of their own paths, so a database under `ocdbt.process_3/` is merged by reference.
Keys rise strictly. A child node's keys lack the prefix its parent names for it. Numbered databases keep their
versions in `manifest.<generation, 16 hex digits>`, of which the newest counts. We write kind single, one version,
zstd, and nothing stripped (`tree.py`); we read the newest version of both kinds.
"""

from tailrace.format.ocdbt.files import DataFile, Indirect
from tailrace.format.ocdbt.manifest import (
    Config,
    Manifest,
    Version,
    decode_manifest,
    encode_manifest,
    newest_numbered_manifest,
)
from tailrace.format.ocdbt.nodes import (
    Child,
    Entry,
    InteriorNode,
    LeafNode,
    Root,
    Statistics,
    decode_node,
    encode_interior_node,
    encode_leaf_node,
)
from tailrace.format.ocdbt.tree import write_tree

__all__ = [
    "Child",
    "Config",
    "DataFile",
    "Entry",
    "Indirect",
    "InteriorNode",
    "LeafNode",
    "Manifest",
    "Root",
    "Statistics",
    "Version",
    "decode_manifest",
    "decode_node",
    "encode_interior_node",
    "encode_leaf_node",
    "encode_manifest",
    "newest_numbered_manifest",
    "write_tree",
]
