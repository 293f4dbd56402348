"""Small CIFAR-10 data sets, in each of the forms in which CIFAR-10 is published."""

import pickle
import tarfile

import numpy as np

NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def make_planes(seed, num_images=3):
    """Labels and pixels as CIFAR-10 keeps them: uint8[N, 3 x 32 x 32], one plane per colour."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, num_images)
    return labels.tolist(), random.integers(0, 256, (num_images, 3072), dtype=np.uint8)


def write_binary(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(NAMES):
        labels, planes = make_planes(seed)
        records = (bytes([label]) + row.tobytes() for label, row in zip(labels, planes))
        (folder / f"{name}.bin").write_bytes(b"".join(records))
    return folder


def write_python(folder, dump=pickle.dumps, text=False):
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(NAMES):
        labels, planes = make_planes(seed)
        fields = {"batch_label": b"a batch", "labels": labels, "data": planes, "filenames": [b"x"]}
        found = fields if text else {key.encode(): value for key, value in fields.items()}
        (folder / name).write_bytes(dump(found))
    return folder


def as_python_2(found):
    """Pickle a batch the way Python 2 did, which wrote the standard files."""

    def short(content):
        return b"U" + bytes([len(content)]) + content

    data, labels = found[b"data"], found[b"labels"]
    number = b"".join(b"K" + bytes([n]) for n in labels)
    shape = b"K" + bytes([len(labels)]) + b"M\x00\x0c\x86"
    dtype = b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + short(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    content = b"T" + data.size.to_bytes(4, "little") + data.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b")
    array += b"\x87R(K\x01" + shape + dtype + b"\x89" + content + b"tb"
    fields = short(b"data") + array + short(b"labels") + b"](" + number + b"e"
    return b"\x80\x02}(" + fields + b"u."


def write_archive(file, folder):
    with tarfile.open(file, "w:gz") as archive:
        archive.add(folder, folder.name)
    return file
