"""Tokens of a folder's tokenizer: all of a text's, whatever its file says of truncation."""

from __future__ import annotations

import numpy as np
import pytest
from tools.chat_folder import write_tokenizer

from zeroxla.cli.data.text import Corpus
from zeroxla.cli.data.vocabulary import Tokens

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
TEXT = "a text of more than sixteen bytes, with a € in it"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path, setting, side):
    write_tokenizer(tmp_path)
    file = str(tmp_path / "tokenizer.json")
    made = tokenizers.Tokenizer.from_file(file)
    expected = made.encode(TEXT).ids
    if setting == "truncation":
        made.enable_truncation(max_length=16, direction=side)
    else:
        made.enable_padding(length=200, direction=side)
    assert made.encode(TEXT).ids != expected
    made.save(file)
    vocabulary = Tokens(tmp_path, {"eos_token_id": 258})
    assert vocabulary.encode(TEXT) == vocabulary.encode(TEXT, framed=True) == expected
    short, long = vocabulary.encode_spans(["a", TEXT])
    assert short.ids_T.tolist() == vocabulary.encode("a")
    assert long.ids_T.tolist() == expected
    data = np.frombuffer(b"\0" + TEXT.encode(), np.uint8)
    corpus = Corpus(train=data, valid=data, num_train_files=1, num_valid_files=1, source="text")
    assert vocabulary.corpus(corpus).train.tolist() == [258, *expected]
