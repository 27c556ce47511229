-- The receipts of effects, each committed with its effect.
CREATE TABLE IF NOT EXISTS onceward_receipt (
    namespace text COLLATE "C" NOT NULL,
    subject text COLLATE "C" NOT NULL,
    value text COLLATE "C" NOT NULL,
    fingerprint text COLLATE "C",
    fence bigint NOT NULL,
    outcome smallint NOT NULL,
    result_code integer NOT NULL,
    result_metadata text NOT NULL,
    result_body bytea NOT NULL,
    created_at timestamptz NOT NULL,
    CONSTRAINT onceward_receipt_pkey PRIMARY KEY (namespace, subject, value)
);

-- For purging.
CREATE INDEX IF NOT EXISTS onceward_receipt_created_at ON onceward_receipt (created_at);

COMMENT ON TABLE onceward_receipt IS 'One row for each idempotency key whose effect is in this database';
COMMENT ON COLUMN onceward_receipt.fence IS 'Fencing token of the reservation';
COMMENT ON COLUMN onceward_receipt.outcome IS '1 completed, 2 failed';
COMMENT ON COLUMN onceward_receipt.result_metadata IS 'JSON array of [name, value] pairs';
