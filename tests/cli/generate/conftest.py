"""Models to generate with."""

import pytest
from tools.text_models import text_folder


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """Folders of models by their family, made when asked for."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = text_folder(tmp_path_factory.mktemp(name) / name, name)
        return made[name]

    return get
