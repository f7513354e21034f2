"""Files that earlier commits wrote, and the tests that today's code reads them."""
