"""What SGLang's registry is given: each module has an `EntryClass`, registered by its name."""
