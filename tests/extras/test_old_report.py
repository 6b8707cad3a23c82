"""The report of a directory that an earlier version left."""

import pytest

from tests.long.test_old_records import old, only_campaign  # noqa: F401 (a fixture)

pytestmark = pytest.mark.extras


@pytest.mark.parametrize("format", ["html", "svg", "parquet"])
def test_it_is_reported_as_page_images_and_rows(old, here, retrain, format):  # noqa: F811
    result = retrain("report", only_campaign(old).directory, "-o", f"report.{format}", "--format", format)
    assert result.returncode == 0, result.stderr
    assert [path for path in here.glob("report*") if path.stat().st_size > 0]
