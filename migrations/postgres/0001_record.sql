CREATE TABLE onceward_record (
    id uuid PRIMARY KEY,
    namespace text COLLATE "C" NOT NULL,
    subject text COLLATE "C" NOT NULL,
    value text COLLATE "C" NOT NULL,
    token text COLLATE "C" NOT NULL,
    earlier_tokens bytea NOT NULL,
    fence bigint NOT NULL,
    version bigint NOT NULL,
    attempt integer NOT NULL,
    status smallint NOT NULL,
    resolved boolean NOT NULL,
    on_expiry smallint NOT NULL,
    owner text COLLATE "C",
    fingerprint text COLLATE "C",
    origin text COLLATE "C",
    lock_ttl bigint NOT NULL,
    retention bigint NOT NULL,
    created_at timestamptz NOT NULL,
    locked_until timestamptz NOT NULL,
    finished_at timestamptz,
    expires_at timestamptz,
    purge_after timestamptz NOT NULL,
    checkpoint bytea,
    checkpoint_sequence bigint,
    result_code integer,
    result_metadata text,
    result_body bytea,
    CONSTRAINT onceward_record_status CHECK (status BETWEEN 1 AND 4),
    CONSTRAINT onceward_record_on_expiry CHECK (on_expiry BETWEEN 1 AND 2)
-- Pages are left half empty, so that the larger row of a finished record often finds room on its own page: a HOT update.
) WITH (fillfactor = 50);

-- The only index beside the primary key. Its column is set at the insert and moved by the sweeper alone, so that neither
-- a Renew nor a Complete is kept from being a HOT update.
CREATE INDEX onceward_record_purge_after ON onceward_record (purge_after);

COMMENT ON TABLE onceward_record IS 'One row for each idempotency key';
COMMENT ON COLUMN onceward_record.id IS 'A hash of namespace, subject and value';
COMMENT ON COLUMN onceward_record.earlier_tokens IS 'Hashes of the last 16 tokens before this one, 8 bytes each';
COMMENT ON COLUMN onceward_record.fence IS 'Fencing token: grows with every reservation';
COMMENT ON COLUMN onceward_record.version IS 'Grows with every write';
COMMENT ON COLUMN onceward_record.status IS '1 in progress, 2 completed, 3 failed, 4 failed and retryable';
COMMENT ON COLUMN onceward_record.on_expiry IS '1 retry, 2 hold';
COMMENT ON COLUMN onceward_record.lock_ttl IS 'Microseconds, as granted at the reservation';
COMMENT ON COLUMN onceward_record.retention IS 'Microseconds, from the finish';
COMMENT ON COLUMN onceward_record.expires_at IS 'When the record stops to count; null is never';
COMMENT ON COLUMN onceward_record.purge_after IS 'When the sweeper looks at the row';
COMMENT ON COLUMN onceward_record.result_metadata IS 'JSON array of [name, value] pairs';
