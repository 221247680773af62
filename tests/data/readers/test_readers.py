"""Files by their suffix."""

import pytest
from file_toys import read


def test_unknown_suffix(tmp_path):
    with pytest.raises(ValueError, match=r"data files end in .json, .*, not in '.xls'"):
        read(tmp_path, "a.xls", "x")
