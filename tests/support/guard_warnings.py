"""What guards of steps warn of."""

import warnings


def said_by(function):
    """Returns what guards warned of while a function ran."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    said = [str(w.message) for w in found]
    return [text for text in said if "gradients are not finite" in text]
