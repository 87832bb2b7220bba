from tests.simt import plan_page


def test_the_committed_page_is_up_to_date():
    """If this fails: python tests/simt/plan_page.py --write"""
    assert plan_page.PAGE.read_text() == plan_page.page()


def test_every_size_of_awd_lstm_is_persistent_on_every_large_gpu():
    """H 1150 without rounds, 20 rows: the plain variants of 9 and 16 columns."""
    for name in ("A100", "H100 PCIe", "B200", "RTX 4090", "L40S", "RTX 5090", "RTX PRO 6000"):
        one, _ = plan_page.largest(*plan_page.GPUS[name], 1150, 0, 2, {}, ("forward", "backward"))
        assert one >= 20, name
