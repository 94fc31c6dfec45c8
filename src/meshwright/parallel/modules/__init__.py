"""Operations on modules that several strategies share: wrapping, materialising, averaging, unwrapping."""
