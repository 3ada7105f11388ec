"""Published archives: fetched once, resumed when interrupted, checked before they are believed, extracted safely."""
