"""The only place that imports boto3: one small module per service, raw answers in, typed values out."""
